-- release: end an execution of a task: the task goes back into the queue, or is over. Once, whoever says it.
-- KEYS[1] queue list, [2] started zset, [3] finished zset, [4] failed zset, [5] canceled zset
-- ARGV[1] what the keys of tasks begin with, [2] the same of executions, [3] task, [4] execution
--     [5] what becomes of it: queued, finished, failed, canceled
--     [6] the version of its job if this was a loss that counts, else ''
--     [7] how many losses in a row without a version between them are too many   [8] why, in a line
--     [9] how long to keep what is over, s
-- Returns {DONE, what became of it} | {GONE}: that execution was ended before, or what it ran is not there
--     | {ELSEWHERE}: it waits or runs already | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'list', 'zset' })
if bad then return bad end
local id, status, why = ARGV[3], ARGV[5], ARGV[8]
local key = ARGV[1] .. id
local mine = redis.call('ZREM', KEYS[2], id .. ':' .. ARGV[4])
redis.call('DEL', ARGV[2] .. id .. ':' .. ARGV[4])
if mine == 0 or not is_hash(key) then return { 'GONE' } end
if status == 'queued' then
  if redis.call('LPOS', KEYS[1], id) or runs(KEYS[2], id) then return { 'ELSEWHERE' } end
  if redis.call('HGET', key, 'status') == 'canceled' then
    status = 'canceled'
  elseif ARGV[6] ~= '' then
    local again = redis.call('HGET', key, 'kvps_version') == ARGV[6]
    local losses = again and tonumber(redis.call('HGET', key, 'kvps_losses') or '') or 0
    redis.call('HSET', key, 'kvps_version', ARGV[6], 'kvps_losses', losses + 1)
    if losses + 1 >= tonumber(ARGV[7]) then
      status, why = 'failed', 'lost ' .. ARGV[7] .. ' times in a row before anything was committed; last: ' .. why
    end
  end
end
if status == 'queued' then
  redis.call('HSET', key, 'status', status, 'worker_name', '')
  insert(KEYS[1], id)
else
  local registry = status == 'finished' and KEYS[3] or status == 'failed' and KEYS[4] or KEYS[5]
  over(registry, key, id, status, why, tonumber(ARGV[9]))
end
return { 'DONE', status }
