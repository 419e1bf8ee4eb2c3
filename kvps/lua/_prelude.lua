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

-- A server that was started again, or a replica that was promoted, may have lost its last writes: until a new history
-- has begun, nothing is accepted, committed or deleted on the word of those who remember more than it does.
local function another_life(noted)
  if not redis.call('INFO', 'server'):find('run_id:' .. noted, 1, true) then return { 'LIFE' } end
end

local function worker_entry(key, worker)
  local text = redis.call('HGET', key, worker)
  return text and cjson.decode(text)
end

-- The unit that was taken and not pushed goes to another.
local function drop_unit(entry, units)
  if entry.unit then redis.call('HSET', units, entry.unit, 'free') end
  entry.unit = nil
end

-- In the vector clock. Who is rejoining had its process cut off by a new life of the server: the others wait for it.
local function counts(entry) return entry.state == 'active' or entry.state == 'rejoining' end

-- Out of the vector clock; what waits still commits.
local function depart(entry, units)
  entry.state = entry.pending > 0 and 'draining' or 'gone'
  drop_unit(entry, units)
end

local function count(number) return string.format('%.0f', number) end
