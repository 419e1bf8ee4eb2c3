-- cancel: take a job's waiting tasks out of the queue, and mark its running tasks: their hosts read the mark.
-- KEYS[1] queue list, [2] started zset, [3] canceled zset
-- ARGV[1] prefix of the keys of tasks   [2] job   [3] how long to keep ended tasks, s
-- Returns {OK, how many waited, how many run} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'list', 'zset' })
if bad then return bad end
local pattern = '^%d+%-' .. ARGV[2]:gsub('%-', '%%-') .. '%-w%d+$'
local waited, running = 0, 0
for _, id in ipairs(redis.call('LRANGE', KEYS[1], 0, -1)) do
  if id:match(pattern) then
    waited = waited + redis.call('LREM', KEYS[1], 0, id)
    if is_hash(ARGV[1] .. id) then over(KEYS[3], ARGV[1] .. id, id, 'canceled', 'kvps cancel', tonumber(ARGV[3])) end
  end
end
for _, one in ipairs(started(KEYS[2])) do
  if one[1]:match(pattern) and is_hash(ARGV[1] .. one[1]) then
    running = running + 1
    redis.call('HSET', ARGV[1] .. one[1], 'status', 'canceled')
  end
end
return { 'OK', waited, running }
