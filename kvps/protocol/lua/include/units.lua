-- units: gives units of data back. The next worker that asks gets a unit that is free.
local function free_unit(unit)
  redis.call('HSET', keys.units, unit, 'free')
  redis.call('ZADD', keys.free_units, unit, unit)
end

-- Frees the unit that a worker has taken and not pushed. Returns whether it had one.
local function drop_unit(entry)
  local unit = entry.unit
  entry.unit = nil
  if unit then free_unit(unit) end
  return unit ~= nil
end
