-- cancel: take a job's waiting tasks out of the queue, and mark its running tasks: their hosts read the mark.
-- KEYS queue:list started:zset canceled
-- ARGV prefix job kept_s
--   prefix: of the keys of tasks
--   kept_s: how long to keep ended tasks
-- USES registries tasks
-- Returns {OK, how many waited, how many run} | {WRONGTYPE, key, is, want}
local waited, running = 0, 0
local function is_of_job(id) return fields(prefix .. id, 'description'):match('^(%S+) w%d+$') == job end
for _, id in ipairs(redis.call('LRANGE', keys.queue, 0, -1)) do
  if is_of_job(id) then
    waited = waited + redis.call('LREM', keys.queue, 0, id)
    over(keys.canceled, prefix .. id, id, 'canceled', 'kvps cancel', tonumber(kept_s))
  end
end
for _, task in ipairs(started(keys.started)) do
  if is_of_job(task.id) then
    running = running + 1
    redis.call('HSET', prefix .. task.id, 'status', 'canceled')
  end
end
return { 'OK', waited, running }
