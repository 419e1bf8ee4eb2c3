-- The prelude of every script: the functions that they share.
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

-- Return a value, which anybody may have written, as at most `most` characters of printable ASCII, like every reply.
local function plain(value, most) return ((value or ''):sub(1, most):gsub('[^\32-\126]', '?')) end

-- Return whether a task may have this id. A longer one would be cut in replies, and then name no task.
local function is_id(id) return #id <= 200 and id:find('^[%w_-]+$') end

-- Return fields of a hash as such text; '' for each if the key holds no hash.
local function fields(key, ...)
  local out = {}
  for i, name in ipairs({ ... }) do out[i] = is_hash(key) and plain(redis.call('HGET', key, name), 500) or '' end
  return unpack(out)
end

-- Return the call (JSON) of a task; '' if there is none, if it is too long, or if it is not printable ASCII.
local function payload(key)
  if not is_hash(key) or redis.call('HSTRLEN', key, 'data') > 1024 then return '' end
  local data = redis.call('HGET', key, 'data') or ''
  return data:find('[^\32-\126]') and '' or data
end

-- Return when the job of a task was submitted, in us. A task whose id does not say comes last.
local function submitted(id) return tonumber(id:match('^(%d+)%-') or '') or math.huge end

-- Insert a task behind those of its job and of all jobs submitted before: the oldest job is always in front.
local function insert(queue, id)
  local mine, last = submitted(id), redis.call('LINDEX', queue, -1)
  if last and submitted(last) > mine then
    for _, other in ipairs(redis.call('LRANGE', queue, 0, -1)) do
      if submitted(other) > mine then return redis.call('LINSERT', queue, 'BEFORE', other, id) end
    end
  end
  redis.call('RPUSH', queue, id)
end

-- Return {task, execution} for each valid entry of the registry of running tasks.
local function started(registry)
  local out = {}
  for _, entry in ipairs(redis.call('ZRANGE', registry, 0, -1)) do
    local id, execution = entry:match('^([^:]+):([^:]+)$')
    if id and is_id(id) and is_id(execution) then out[#out + 1] = { id, execution } end
  end
  return out
end

-- End a task: it expires after ttl seconds, and goes into a registry of ended tasks. That registry is for display only,
-- so a key of another type in its place must not hold up the waiting tasks.
local function over(registry, key, id, status, why, ttl)
  redis.call('HSET', key, 'status', status, 'kvps_why', why)
  redis.call('EXPIRE', key, ttl)
  local is, now = redis.call('TYPE', registry).ok, redis.call('TIME')[1]
  if is ~= 'none' and is ~= 'zset' then return end
  redis.call('ZREMRANGEBYSCORE', registry, '-inf', now)
  redis.call('ZADD', registry, now + ttl, id)
end
