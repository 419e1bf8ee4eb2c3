-- submit: put all tasks of a job into the queue, one behind the other, in one step.
-- KEYS queue:list queues:set
-- ARGV prefix name tasks...
--   prefix: of the keys of tasks
--   name: of the queue
--   tasks: id, payload, description of each
-- USES order
-- Returns {OK} also when repeated | {WRONGTYPE, key, is, want}
redis.call('SADD', keys.queues, keys.queue)
for i = 1, #tasks, 3 do
  local id, payload, description = unpack(tasks, i, i + 2)
  local key = prefix .. id
  if redis.call('EXISTS', key) == 0 then
    redis.call('HSET', key, 'data', payload, 'description', description, 'origin', name, 'status', 'queued')
    insert(keys.queue, id)
  end
end
return { 'OK' }
