-- release: end an execution of a task, which goes back into the queue or is over. Only the first call has an effect.
-- KEYS[1] queue list, [2] started zset, [3] finished zset, [4] failed zset, [5] canceled zset
-- ARGV[1] prefix of the keys of tasks, [2] task, [3] execution
--     [4] new status: queued, finished, failed, canceled; or refused, which is failed with its payload deleted
--     [5] the version of the task's job if this was a loss that counts, else ''
--     [6] how many losses in a row without a version between them are too many   [7] the reason, in a line
--     [8] how long to keep ended tasks, s
-- Returns {DONE, new status}
--     | {GONE}: that execution has ended before, or its task does not exist | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'list', 'zset' })
if bad then return bad end
local id, status, why = ARGV[2], ARGV[4], ARGV[7]
local key = ARGV[1] .. id
if redis.call('ZREM', KEYS[2], id .. ':' .. ARGV[3]) == 0 or not is_hash(key) then return { 'GONE' } end
local before, version, losses = fields(key, 'status', 'kvps_version', 'kvps_losses')
if status == 'queued' then
  if before == 'canceled' then
    status = 'canceled'
  elseif ARGV[5] ~= '' then
    losses = (version == ARGV[5] and tonumber(losses) or 0) + 1
    redis.call('HSET', key, 'kvps_version', ARGV[5], 'kvps_losses', losses)
    if losses >= tonumber(ARGV[6]) then
      status, why = 'failed', 'lost ' .. ARGV[6] .. ' times in a row before anything was committed; last: ' .. why
    end
  end
elseif status == 'refused' then
  redis.call('HDEL', key, 'data')
  status = 'failed'
end
if status == 'queued' then
  redis.call('HSET', key, 'status', status, 'worker_name', '')
  insert(KEYS[1], id)
else
  local registry = status == 'finished' and KEYS[3] or status == 'failed' and KEYS[4] or KEYS[5]
  over(registry, key, id, status, why, tonumber(ARGV[8]))
end
return { 'DONE', status }
