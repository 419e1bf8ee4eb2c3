-- mirror: note that the bytes of a version, which live in shared memory, are in Redis too, and all else that it was: so
-- that others can read it, and the job can go on from it when the memory is lost. See rollback.
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
