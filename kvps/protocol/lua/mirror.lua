-- mirror: note that Redis has the bytes of a version that is in shared memory, and the job's state at that version. So
-- other readers can read that version, and rollback can continue from it when the memory is lost.
-- KEYS[1] version hash, [2] mirror string, [3] term string
-- ARGV[1] job id   [2] term   [3] the server's run id when the caller read the version   [4] the record, JSON
-- Returns {OK} also when repeated | {TERM, term} | {RESTARTED} | {NOJOB} | {ANOTHER} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'string', 'string' })
if bad then return bad end
local another = another_job(redis.call('HGET', KEYS[1], 'id'))
if another then return another end
local lost = restarted(ARGV[3])
if lost then return lost end
local holds = redis.call('GET', KEYS[3]) or ''
if holds ~= ARGV[2] then return { 'TERM', holds } end
redis.call('SET', KEYS[2], ARGV[4])
return { 'OK' }
