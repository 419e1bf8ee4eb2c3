-- traces: appends entries to a trace, each a text of names and values. The traces of a thousand workers take no more
-- room than those of sixty. `losses` keeps those of the whole run, of every 2^n-th round: n grows with the rounds.
local function note_loss(key, entry)
  local loss = tonumber(entry:match(' loss (%S+)'))
  local round = loss and tonumber(entry:match('^round (%S+)'))
  if not round or loss ~= loss or math.abs(loss) == math.huge then return end
  local every, before = unpack(redis.call('HMGET', key, 'every', round))
  every = tonumber(every or '1')
  if round % every ~= 0 then return end
  local number, sum, low, high = (before or ''):match('^(%d+) (%S+) (%S+) (%S+)$')
  low, high = math.min(tonumber(low) or loss, loss), math.max(tonumber(high) or loss, loss)
  local text = string.format('%d %.9g %.6g %.6g', (number or 0) + 1, (tonumber(sum) or 0) + loss, low, high)
  local kept = redis.call('HSET', key, round, text) == 1 and redis.call('HLEN', key) or 0
  if kept <= 1000 then return end
  if kept > 2000 then return redis.call('DEL', key) end -- another program wrote there
  every = 2 * every
  for _, field in ipairs(redis.call('HKEYS', key)) do
    if (tonumber(field) or 0) % every ~= 0 then redis.call('HDEL', key, field) end
  end
  redis.call('HSET', key, 'every', every)
end

local function append_traces(key, entries, workers, losses)
  local most = math.max(50, math.min(1000, math.floor(60000 / workers)))
  for _, entry in ipairs(entries) do
    local values = {}
    for value in entry:gmatch('%S+') do values[#values + 1] = value end
    redis.call('XADD', key, 'MAXLEN', '~', most, '*', unpack(values))
    if losses then note_loss(losses, entry) end
  end
end
