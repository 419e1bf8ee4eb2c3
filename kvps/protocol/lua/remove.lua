-- remove: delete a job's control keys in one step: from then on every script answers NOJOB. Its name stays taken until
-- its bytes are unlinked (see forget), so that an interrupted removal can be completed.
-- KEYS version:hash removed:string workers:hash control... never
-- ARGV job known_workers
--   job: '' if a damaged job has no id
--   control: all control keys of the job, but `removed`
--   known_workers: how many workers the caller knows; their traces are among `control`
-- USES job numbers
-- Returns {OK, deleted} | {MORE}: workers have joined meanwhile | {NOJOB} | {ANOTHER} | {WRONGTYPE, key, is, want}
local id = redis.call('HGET', keys.version, 'id')
if job ~= '' or id then
  local another = another_job(id, job)
  if another then return another end
end
if digits(redis.call('HLEN', keys.workers)) ~= known_workers then return { 'MORE' } end
redis.call('SET', keys.removed, job)
-- Lua can pass some 8,000 values to one call, so large sets are deleted in slices.
local deleted = 0
for i = 1, #keys.control, 1000 do
  deleted = deleted + redis.call('DEL', unpack(keys.control, i, math.min(i + 999, #keys.control)))
end
return { 'OK', deleted }
