-- sync: write a mark behind all that the server has of a job. A replica that has the mark has all of that too, so WAIT
-- on the same connection tells whether a failover could lose any of it.
-- KEYS[1] version hash, [2] sync string
-- ARGV[1] job id   [2] the caller's history, or '' for any
-- Returns {OK} also when repeated | {HISTORY, history} | {RESTARTED} | {NOJOB} | {ANOTHER}
--     | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'string' })
if bad then return bad end
local at = redis.call('HMGET', KEYS[1], 'id', 'history', 'run_id')
local refused = another_job(at[1]) or restarted(at[3])
if refused then return refused end
if ARGV[2] ~= '' and ARGV[2] ~= at[2] then return { 'HISTORY', at[2] } end
redis.call('DEL', KEYS[2]) -- first, since it is allowed when memory is full, and lets the script write
redis.call('SET', KEYS[2], '')
return { 'OK' }
