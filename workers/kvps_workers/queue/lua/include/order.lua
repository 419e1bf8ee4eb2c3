-- order: the queue is kept in the order in which jobs were submitted; tasks that jobs can do without come behind.

-- Returns the place of a task: when its job was submitted, in us, or more. A task whose id does not say comes last.
local function place(id) return tonumber(id:match('^(%d+)%-') or '') or math.huge end

-- Inserts a task behind those of its job and of all jobs submitted before: the oldest job is always in front.
local function insert(queue, id)
  local mine, last = place(id), redis.call('LINDEX', queue, -1)
  if last and place(last) > mine then
    for _, other in ipairs(redis.call('LRANGE', queue, 0, -1)) do
      if place(other) > mine then return redis.call('LINSERT', queue, 'BEFORE', other, id) end
    end
  end
  redis.call('RPUSH', queue, id)
end
