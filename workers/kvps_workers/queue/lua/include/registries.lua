-- registries: RQ's sorted sets of running and of ended tasks.
-- USES tasks

-- Returns the id and the execution of each valid entry of the registry of running tasks.
local function started(registry)
  local running = {}
  for _, entry in ipairs(redis.call('ZRANGE', registry, 0, -1)) do
    local id, execution = entry:match('^([^:]+):([^:]+)$')
    if id and is_id(id) and is_id(execution) then running[#running + 1] = { id = id, execution = execution } end
  end
  return running
end

-- Ends a task: it expires after ttl seconds, and goes into a registry of ended tasks. That registry is for display only,
-- so a key of another type in its place must not hold up the waiting tasks.
local function over(registry, key, id, status, reason, ttl)
  redis.call('HSET', key, 'status', status, 'kvps_why', reason)
  redis.call('EXPIRE', key, ttl)
  local kind, now = redis.call('TYPE', registry).ok, unpack(redis.call('TIME'))
  if kind ~= 'none' and kind ~= 'zset' then return end
  redis.call('ZREMRANGEBYSCORE', registry, '-inf', now)
  redis.call('ZADD', registry, now + ttl, id)
end
