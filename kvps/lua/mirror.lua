-- mirror: note that the bytes of a version, which live in shared memory, are in Redis too, and all else that it was: so
-- that others can read it, and the job can go on from it when the memory is lost. See rollback.
-- KEYS[1] version hash, [2] mirror string, [3] term string
-- ARGV[1] term   [2] the server's life in which the caller read the version   [3] the record, JSON
-- Returns {OK} also when repeated | {TERM, term} | {LIFE} | {NOJOB} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'string', 'string' })
if bad then return bad end
if redis.call('EXISTS', KEYS[1]) == 0 then return { 'NOJOB' } end
local lost = another_life(ARGV[2])
if lost then return lost end
local holds = redis.call('GET', KEYS[3]) or ''
if holds ~= ARGV[1] then return { 'TERM', holds } end
redis.call('SET', KEYS[2], ARGV[3])
return { 'OK' }
