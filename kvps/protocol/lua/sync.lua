-- sync: write a mark behind all that the server has of a job. A replica that has the mark has all of that too, so WAIT
-- on the same connection tells whether a failover could lose any of it.
-- KEYS version:hash sync:string never
-- ARGV job history
--   history: the caller's, or '' for any
-- USES job
-- Returns {OK} also when repeated | {HISTORY, history} | {RESTARTED} | {NOJOB} | {ANOTHER}
--     | {WRONGTYPE, key, is, want}
local refused, present_history = read_job(job, 'history')
if refused then return refused end
if history ~= '' and history ~= present_history then return { 'HISTORY', present_history } end
redis.call('DEL', keys.sync) -- first, since it is allowed when memory is full, and lets the script write
redis.call('SET', keys.sync, '')
return { 'OK' }
