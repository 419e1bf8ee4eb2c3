-- release: end an execution of a task, which goes back into the queue or is over. Only the first call has an effect.
-- KEYS queue:list started:zset finished failed canceled
-- ARGV prefix task execution status version most_losses reason kept_s
--   prefix: of the keys of tasks
--   status: the new one: queued, finished, failed, canceled; or refused, which is failed with its payload deleted
--   version: of the task's job if this was a loss that counts, else ''
--   most_losses: how many losses in a row without a version between them are too many
--   reason: in a line
--   kept_s: how long to keep ended tasks
-- USES order registries tasks
-- Returns {DONE, new status}
--     | {GONE}: that execution has ended before, or its task does not exist | {WRONGTYPE, key, is, want}
local key = prefix .. task
if redis.call('ZREM', keys.started, task .. ':' .. execution) == 0 or not is_hash(key) then return { 'GONE' } end
local before, last_version, losses = fields(key, 'status', 'kvps_version', 'kvps_losses')
if status == 'queued' then
  if before == 'canceled' then
    status = 'canceled'
  elseif version ~= '' then
    losses = (last_version == version and tonumber(losses) or 0) + 1
    redis.call('HSET', key, 'kvps_version', version, 'kvps_losses', losses)
    if losses >= tonumber(most_losses) then
      status, reason = 'failed', 'lost ' .. most_losses .. ' times in a row before anything was committed; last: ' .. reason
    end
  end
elseif status == 'refused' then
  redis.call('HDEL', key, 'data')
  status = 'failed'
end
if status == 'queued' then
  redis.call('HSET', key, 'status', status, 'worker_name', '')
  insert(keys.queue, task)
else
  local registry = status == 'finished' and keys.finished or status == 'failed' and keys.failed or keys.canceled
  over(registry, key, task, status, reason, tonumber(kept_s))
end
return { 'DONE', status }
