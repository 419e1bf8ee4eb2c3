-- order: the queue is kept in the order in which jobs were submitted.

-- Returns when the job of a task was submitted, in us. A task whose id does not say comes last.
local function submitted(id) return tonumber(id:match('^(%d+)%-') or '') or math.huge end

-- Inserts a task behind those of its job and of all jobs submitted before: the oldest job is always in front.
local function insert(queue, id)
  local mine, last = submitted(id), redis.call('LINDEX', queue, -1)
  if last and submitted(last) > mine then
    for _, other in ipairs(redis.call('LRANGE', queue, 0, -1)) do
      if submitted(other) > mine then return redis.call('LINSERT', queue, 'BEFORE', other, id) end
    end
  end
  redis.call('RPUSH', queue, id)
end
