-- units: hands units of data back, and knows which of them make a round.
-- The state of a unit in the units hash is 'free', or what workers do with it: 'w0 computes', 'w0 computes, w1 computes'
-- after it was handed out a second time, 'w0 pushed, w1 computes' once one of them has pushed it. A unit that is committed
-- has none.
-- USES time
local function free_unit(unit)
  redis.call('HSET', keys.units, unit, 'free')
  redis.call('ZADD', keys.free_units, unit, unit)
  redis.call('ZREM', keys.taken_units, unit)
end

-- Returns what other workers do with a unit that a worker has taken, a text each.
local function others_with(unit, worker)
  local others = {}
  for part in (redis.call('HGET', keys.units, unit) or ''):gmatch('[^,]+') do
    local other, does = part:match('^ ?(%S+) (%a+)$')
    if other and other ~= worker then others[#others + 1] = other .. ' ' .. does end
  end
  return others
end

-- Takes a worker's part in a unit back. The unit is free then, unless a second worker computes it or has pushed it.
local function withdraw(worker, unit)
  local others = others_with(unit, worker)
  if #others == 0 then return free_unit(unit) end
  redis.call('HSET', keys.units, unit, table.concat(others, ', '))
  local first = unpack(others)
  if first:find(' computes$') then redis.call('ZADD', keys.taken_units, now_ms(), unit) end
end

-- Notes that a worker has pushed a unit. Returns when it was handed out (ms), or nil if a second worker has it too.
local function note_pushed(worker, unit)
  local taken = redis.call('ZSCORE', keys.taken_units, unit)
  redis.call('HSET', keys.units, unit, table.concat({ worker .. ' pushed', unpack(others_with(unit, worker)) }, ', '))
  redis.call('ZREM', keys.taken_units, unit)
  return taken and tonumber(taken)
end

-- Gives the unit back that a worker has taken and not pushed, unless it is committed. Returns whether it had one.
local function drop_unit(worker, entry)
  local unit = entry.unit
  entry.unit = nil
  if unit and redis.call('HEXISTS', keys.units, unit) == 1 then withdraw(worker, unit) end
  return unit ~= nil
end
