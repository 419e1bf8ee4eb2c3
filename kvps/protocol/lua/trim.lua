-- trim: delete the log before a commit's entry, when a file has the log up to that commit. The entry itself stays: the
-- newest weights are always checked against it. The time of the first join is noted before its entry is deleted.
-- KEYS[1] version hash, [2] commits stream
-- ARGV[1] job id   [2] history in which the entry was read   [3] the id of the commit's entry   [4] its version
-- Returns {OK, trimmed} also when repeated | {HISTORY, history} | {NOJOB} | {ANOTHER} | {RESTARTED}
--     | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'stream' })
if bad then return bad end
local at = redis.call('HMGET', KEYS[1], 'id', 'history', 'moved', 'began', 'run_id')
local refused = another_job(at[1]) or restarted(at[5])
if refused then return refused end
if at[2] ~= ARGV[2] then return { 'HISTORY', at[2] } end
local second = redis.call('XRANGE', KEYS[2], '-', '+', 'COUNT', 2)[2]
local trimmed = redis.call('XTRIM', KEYS[2], 'MINID', ARGV[3])
if whole(ARGV[4]) > whole(at[3] or '0') then redis.call('HSET', KEYS[1], 'moved', ARGV[4]) end
if not at[4] and second then redis.call('HSET', KEYS[1], 'began', second[1]:match('^%d+')) end
return { 'OK', trimmed }
