-- submit: put all tasks of a job into the queue, one behind the other, in one step.
-- KEYS[1] queue list, [2] set of queues
-- ARGV[1] prefix of the keys of tasks, [2] the queue's name   [3...] of each task: id, payload, description
-- Returns {OK} also when repeated | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'list', 'set' })
if bad then return bad end
redis.call('SADD', KEYS[2], KEYS[1])
for at = 3, #ARGV, 3 do
  local id, key = ARGV[at], ARGV[1] .. ARGV[at]
  if redis.call('EXISTS', key) == 0 then
    redis.call('HSET', key, 'data', ARGV[at + 1], 'description', ARGV[at + 2], 'origin', ARGV[2], 'status', 'queued')
    insert(KEYS[1], id)
  end
end
return { 'OK' }
