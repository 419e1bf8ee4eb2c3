-- traces: appends entries to a trace, each a text of names and values. The traces of a thousand workers take no more
-- room than those of sixty. `losses` keeps those of the whole run, of every 2^n-th round: n grows with the rounds.
local function note_loss(key, every, round, loss)
  if not round or not loss or loss ~= loss or math.abs(loss) == math.huge or round % every ~= 0 then return every end
  local number, sum, low, high = (redis.call('HGET', key, round) or ''):match('^(%d+) (%S+) (%S+) (%S+)$')
  low, high = math.min(tonumber(low) or loss, loss), math.max(tonumber(high) or loss, loss)
  local text = string.format('%d %.9g %.6g %.6g', (number or 0) + 1, (tonumber(sum) or 0) + loss, low, high)
  redis.call('HSET', key, round, text)
  if redis.call('HLEN', key) <= 1000 then return every end
  every = 2 * every
  local fields = redis.call('HGETALL', key)
  for i = 1, #fields, 2 do
    if (tonumber(fields[i]) or 0) % every ~= 0 then redis.call('HDEL', key, fields[i]) end
  end
  redis.call('HSET', key, 'every', every)
  return every
end

local function append_traces(key, entries, workers, losses)
  local most = math.max(50, math.min(1000, math.floor(60000 / workers)))
  local every = losses and #entries > 0 and tonumber(redis.call('HGET', losses, 'every') or '1') or 1
  for _, entry in ipairs(entries) do
    local values = {}
    for value in entry:gmatch('%S+') do values[#values + 1] = value end
    redis.call('XADD', key, 'MAXLEN', '~', most, '*', unpack(values))
    if losses then
      local round, loss = entry:match('^round (%S+)'), entry:match(' loss (%S+)')
      every = note_loss(losses, every, tonumber(round), tonumber(loss))
    end
  end
end
