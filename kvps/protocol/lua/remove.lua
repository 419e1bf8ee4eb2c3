-- remove: delete a job's control keys in one step: from then on every script answers NOJOB. Its name stays taken until
-- its bytes are unlinked (see forget), so that an interrupted removal can be completed.
-- KEYS[1] version hash, [2] removed string, [3] workers hash, [4...] all other control keys of the job
-- ARGV[1] job id, '' if a damaged job has none   [2] how many workers the caller knows; their traces are among KEYS
-- Returns {OK, deleted} | {MORE}: workers have joined meanwhile | {NOJOB} | {ANOTHER} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'string', 'hash' })
if bad then return bad end
local id = redis.call('HGET', KEYS[1], 'id')
if ARGV[1] ~= '' or id then
  local another = another_job(id)
  if another then return another end
end
if count(redis.call('HLEN', KEYS[3])) ~= ARGV[2] then return { 'MORE' } end
redis.call('SET', KEYS[2], ARGV[1])
return { 'OK', redis.call('DEL', KEYS[1]) + delete_keys(KEYS, 3) }
