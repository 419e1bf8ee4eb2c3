-- cancel: take a job's waiting tasks out of the queue, and mark its running tasks: their hosts read the mark.
-- KEYS queue:list started:zset canceled
-- ARGV prefix job kept_s
--   prefix: of the keys of tasks
--   kept_s: how long to keep ended tasks
-- USES registries tasks
-- Returns {OK, how many waited, how many run} | {WRONGTYPE, key, is, want}
local pattern = '^%d+%-' .. job:gsub('%-', '%%-') .. '%-w%d+$'
local waited, running = 0, 0
for _, id in ipairs(redis.call('LRANGE', keys.queue, 0, -1)) do
  if id:match(pattern) then
    waited = waited + redis.call('LREM', keys.queue, 0, id)
    if is_hash(prefix .. id) then over(keys.canceled, prefix .. id, id, 'canceled', 'kvps cancel', tonumber(kept_s)) end
  end
end
for _, task in ipairs(started(keys.started)) do
  if task.id:match(pattern) and is_hash(prefix .. task.id) then
    running = running + 1
    redis.call('HSET', prefix .. task.id, 'status', 'canceled')
  end
end
return { 'OK', waited, running }
