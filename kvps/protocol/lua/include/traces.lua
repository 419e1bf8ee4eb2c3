-- traces: appends entries to a trace, each a text of names and values. The traces of a thousand workers take no more
-- room than those of sixty. Two hashes have the whole run, of every 2^n-th version: n grows with the versions.

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

-- Notes the losses of iterations: by the version that their weights were before.
local function note_losses(key, entries)
  for _, entry in ipairs(entries) do
    local loss = tonumber(entry:match(' loss (%S+)'))
    local base = loss and tonumber(entry:match('^round %S+ version (%d+)'))
    if base and loss == loss and math.abs(loss) ~= math.huge then
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
local function note_versions(key, entries)
  for _, entry in ipairs(entries) do
    local version = tonumber(entry:match('^version (%d+)'))
    local is_kept, before, every = false, '', 1
    if version then is_kept, before, every = kept_of(key, version) end
    if is_kept then
      local function said(name) return tonumber(entry:match(' ' .. name .. ' (%S+)') or '0') or 0 end
      local parts, received, stored, squares = before:match('^(%S+) (%S+) (%S+) (%S+) ')
      local function sum(noted, name) return (tonumber(noted) or 0) + said(name) end
      local known = (tonumber(parts) or 0) + 1
      keep(key, version, every, string.format('%d %.0f %.0f %.9g %.0f %.0f %.0f %.0f %.0f %.9g', known,
        sum(received, 'received'), sum(stored, 'stored'), sum(squares, 'square_sum'), said('at'),
        said('contributions'), said('progress'), said('late'), said('latest'), said('lr')))
    end
  end
end

local function append_traces(key, entries, workers)
  local most = math.max(50, math.min(1000, math.floor(60000 / workers)))
  for _, entry in ipairs(entries) do
    local values = {}
    for value in entry:gmatch('%S+') do values[#values + 1] = value end
    redis.call('XADD', key, 'MAXLEN', '~', most, '*', unpack(values))
  end
end
