-- Stands before every script: what they share.
--
-- Lua does not roll back, so each script makes all its checks first and writes last. The keys are RQ's, and anybody who
-- may write to the server may have put anything there.

local function wrong_type(types)
  for i, want in ipairs(types) do
    local is = redis.call('TYPE', KEYS[i]).ok
    if is ~= 'none' and is ~= want then return { 'WRONGTYPE', KEYS[i], is, want } end
  end
end

local function is_hash(key) return redis.call('TYPE', key).ok == 'hash' end

-- When the job of a task was submitted, us; what names no time comes last.
local function submitted(id) return tonumber(id:match('^(%d+)%-') or '') or math.huge end

-- Into the queue behind all that were submitted before it, and its own job's: the oldest job always stands in front.
local function insert(queue, id)
  local mine, last = submitted(id), redis.call('LINDEX', queue, -1)
  if last and submitted(last) > mine then
    for _, other in ipairs(redis.call('LRANGE', queue, 0, -1)) do
      if submitted(other) > mine then return redis.call('LINSERT', queue, 'BEFORE', other, id) end
    end
  end
  redis.call('RPUSH', queue, id)
end

-- The task of an entry "<task>:<execution>" of the registry of what runs.
local function task_of(entry) return entry:match('^(.*):[^:]*$') or '' end

-- Whether any execution of a task is in the registry of what runs.
local function runs(registry, id)
  for _, entry in ipairs(redis.call('ZRANGE', registry, 0, -1)) do
    if task_of(entry) == id then return true end
  end
  return false
end

-- Into a registry of what is over, which is there to be looked at: one of another type must not hold up those that wait.
-- The task goes by itself after ttl seconds.
local function over(registry, key, id, status, why, ttl)
  redis.call('HSET', key, 'status', status, 'kvps_why', why)
  local is = redis.call('TYPE', registry).ok
  if is == 'none' or is == 'zset' then redis.call('ZADD', registry, redis.call('TIME')[1] + ttl, id) end
  redis.call('EXPIRE', key, ttl)
end
