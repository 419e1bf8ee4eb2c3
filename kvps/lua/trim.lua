-- trim: the log up to a commit stands in a file, so all before that commit's entry may go. It stays itself: what the
-- newest weights are held against is always here. When the first worker joined is noted before that goes.
-- KEYS[1] version hash, [2] commits stream
-- ARGV[1] history in which the entry was read   [2] the commit's entry   [3] its version
-- Returns {OK, trimmed} also when repeated | {HISTORY, history} | {NOJOB} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'stream' })
if bad then return bad end
local at = redis.call('HMGET', KEYS[1], 'history', 'moved', 'began')
if not at[1] then return { 'NOJOB' } end
if at[1] ~= ARGV[1] then return { 'HISTORY', at[1] } end
local second = redis.call('XRANGE', KEYS[2], '-', '+', 'COUNT', 2)[2]
local trimmed = redis.call('XTRIM', KEYS[2], 'MINID', ARGV[2])
if whole(ARGV[3]) > whole(at[2] or '0') then redis.call('HSET', KEYS[1], 'moved', ARGV[3]) end
if not at[3] and second then redis.call('HSET', KEYS[1], 'began', second[1]:match('^%d+')) end
return { 'OK', trimmed }
