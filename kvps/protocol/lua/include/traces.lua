-- traces: appends entries to a trace, each a text of names and values. The traces of a thousand workers take no more
-- room than those of sixty. Two hashes have the whole run, of every 2^n-th version: n grows with the versions that the job
-- has made since it began. It follows from the version, so that a version costs one write.
-- USES numbers

-- Returns the version with which the job began: that of a checkpoint, or 0.
local function begun_at() return whole(redis.call('HGET', keys.version, 'from_version') or '') or 0 end

local function every_of(version, begun)
  return 2 ^ math.max(0, select(2, math.frexp((version - begun - 1) / 1000)))
end

local function is_kept(version, begun) return version and version % every_of(version, begun) == 0 end

-- Deletes the versions of such a hash that its highest one does not keep, once there are more than a thousand.
local function thin(key, begun)
  local kept, highest = redis.call('HLEN', key), 1
  if kept <= 1000 then return end
  if kept > 4000 then return redis.call('DEL', key) end -- another program wrote there
  local fields = redis.call('HKEYS', key)
  for _, field in ipairs(fields) do highest = math.max(highest, whole(field) or 1) end
  local every = every_of(highest, begun)
  for _, field in ipairs(fields) do
    local version = whole(field)
    if not version or version % every ~= 0 then redis.call('HDEL', key, field) end
  end
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
  local noted, begun = false, begun_at()
  for _, each in ipairs(said) do
    local loss, base = tonumber(each.loss), whole(each.version)
    if loss and base and loss == loss and math.abs(loss) ~= math.huge and is_kept(base + 1, begun) then
      local before = redis.call('HGET', key, base + 1) or ''
      local number, sum, low, high = before:match('^(%d+) (%S+) (%S+) (%S+)$')
      low, high = math.min(tonumber(low) or loss, loss), math.max(tonumber(high) or loss, loss)
      sum = (tonumber(sum) or 0) + loss
      redis.call('HSET', key, base + 1, string.format('%d %.9g %.6g %.6g', (number or 0) + 1, sum, low, high))
      noted = true
    end
  end
  if noted then thin(key, begun) end
end

-- Notes a shard's parts of versions: how many parts there are, the bytes received and stored for them, the sum of
-- squares of the gradient; and of the version when it was made, its contributions and those before it, the sum and the
-- highest of their staleness, the learning rate.
local function note_versions(key, said)
  local begun = begun_at()
  for _, each in ipairs(said) do
    local version = whole(each.version)
    if is_kept(version, begun) then
      local rest = table.concat({ each.at, each.contributions, each.progress or 0, each.late or 0, each.latest or 0,
        each.lr or 0 }, ' ')
      local part = table.concat({ 1, each.received, each.stored, each.square_sum, rest }, ' ')
      if redis.call('HSETNX', key, version, part) == 0 then -- another shard has told of it
        local noted = { redis.call('HGET', key, version):match('^(%S+) (%S+) (%S+) (%S+) ') }
        local function sum(place, value) return (tonumber(noted[place]) or 0) + (tonumber(value) or 0) end
        redis.call('HSET', key, version, table.concat({ sum(1, 1), sum(2, each.received), sum(3, each.stored),
          sum(4, each.square_sum), rest }, ' '))
      end
    end
  end
  thin(key, begun)
end
