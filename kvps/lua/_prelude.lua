-- Stands before every script: the few checks that all of them need.
--
-- Lua does not roll back, so each script makes all its checks first and writes last. Numbers from outside are
-- taken by `whole` alone: tonumber accepts nan, 0x10 and 1e3, and doubles above 2^53 are not whole any more.

local function whole(text)
  if type(text) ~= 'string' or #text > 16 or not text:find('^%d+$') then return nil end
  local number = tonumber(text)
  return number < 9007199254740992 and number or nil
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- A key of another type would stop the script in the middle of its writes.
local function wrong_type(types)
  for i, want in ipairs(types) do
    local is = redis.call('TYPE', KEYS[i]).ok
    if is ~= 'none' and is ~= want then return { 'WRONGTYPE', KEYS[i], is, want } end
  end
end

local function worker_entry(key, worker)
  local text = redis.call('HGET', key, worker)
  return text and cjson.decode(text)
end

local function count(number) return string.format('%.0f', number) end
