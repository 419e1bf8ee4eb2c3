-- mirror: note that Redis has the bytes of a version that is in shared memory, and the job's state at that version. So
-- other readers can read that version, and rollback can continue from it when the memory is lost.
-- KEYS version:hash mirror:string term(shard):string never
-- ARGV job term run_id record
--   run_id: the server's when the caller read the version
--   record: JSON
-- USES job
-- Returns {OK} also when repeated | {TERM, term} | {RESTARTED} | {NOJOB} | {ANOTHER} | {WRONGTYPE, key, is, want}
local another = another_job(redis.call('HGET', keys.version, 'id'), job)
if another then return another end
local lost = restarted(run_id)
if lost then return lost end
local present = redis.call('GET', keys.term) or ''
if present ~= term then return { 'TERM', present } end
redis.call('SET', keys.mirror, record)
return { 'OK' }
