-- traces: appends entries to a trace, each a text of names and values. The traces of a thousand workers take no more
-- room than those of sixty. Two hashes have the whole run, of every 2^n-th version: n grows with the versions.
-- USES numbers

-- Returns whether such a hash keeps this version, what it has there, and of how many versions it keeps one.
local function kept_of(key, version)
  local every, before = unpack(redis.call('HMGET', key, 'every', version))
  every = tonumber(every or '1')
  return version % every == 0, before or '', every
end

local function keep(key, version, every, text)
  local kept = redis.call('HSET', key, version, text) == 1 and redis.call('HLEN', key) or 0
  if kept <= 1000 then return end
  if kept > 2000 then return redis.call('DEL', key) end -- another program wrote there
  every = 2 * every
  for _, field in ipairs(redis.call('HKEYS', key)) do
    if (tonumber(field) or 0) % every ~= 0 then redis.call('HDEL', key, field) end
  end
  redis.call('HSET', key, 'every', every)
end

-- Appends entries, and returns what they say, by name.
local function append_traces(key, entries, workers)
  local most = math.max(50, math.min(1000, math.floor(60000 / workers)))
  local said = {}
  for i, entry in ipairs(entries) do
    local values, named, name = {}, {}, nil
    for value in entry:gmatch('%S+') do
      values[#values + 1] = value
      if name then named[name], name = value, nil else name = value end
    end
    redis.call('XADD', key, 'MAXLEN', '~', most, '*', unpack(values))
    said[i] = named
  end
  return said
end

-- Notes the losses of iterations: by the version that their weights were before.
local function note_losses(key, said)
  for _, each in ipairs(said) do
    local loss, base = tonumber(each.loss), whole(each.version)
    if loss and base and loss == loss and math.abs(loss) ~= math.huge then
      local is_kept, before, every = kept_of(key, base + 1)
      if is_kept then
        local number, sum, low, high = before:match('^(%d+) (%S+) (%S+) (%S+)$')
        low, high = math.min(tonumber(low) or loss, loss), math.max(tonumber(high) or loss, loss)
        sum = (tonumber(sum) or 0) + loss
        keep(key, base + 1, every, string.format('%d %.9g %.6g %.6g', (number or 0) + 1, sum, low, high))
      end
    end
  end
end

-- Notes a shard's parts of versions: how many parts there are, the bytes received and stored for them, the sum of
-- squares of the gradient; and of the version when it was made, its contributions and those before it, the sum and the
-- highest of their staleness, the learning rate.
local function note_versions(key, said)
  for _, each in ipairs(said) do
    local version = whole(each.version)
    local is_kept, before, every = false, '', 1
    if version then is_kept, before, every = kept_of(key, version) end
    if is_kept then
      local parts, received, stored, squares = 1, each.received, each.stored, each.square_sum
      if before ~= '' then
        local noted = { before:match('^(%S+) (%S+) (%S+) (%S+) ') }
        local function sum(place, value) return (tonumber(noted[place]) or 0) + (tonumber(value) or 0) end
        parts, received, stored, squares = sum(1, 1), sum(2, received), sum(3, stored), sum(4, squares)
      end
      keep(key, version, every, table.concat({ parts, received, stored, squares, each.at, each.contributions,
        each.progress or 0, each.late or 0, each.latest or 0, each.lr or 0 }, ' '))
    end
  end
end
