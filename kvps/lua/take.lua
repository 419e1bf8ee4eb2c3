-- take: hand a worker the next unit of the data, or the one it has.
-- KEYS[1] config hash, [2] workers hash, [3] units hash
-- ARGV[1] worker   [2] incarnation
-- Returns {OK, unit} also when repeated | {NONE}: others have all that is left | {DONE}: all are committed
--     | {EVICTED, state} | {NOJOB} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'hash', 'hash' })
if bad then return bad end
local total = whole(redis.call('HGET', KEYS[1], 'units') or '')
if not total then return { 'NOJOB' } end
local worker = ARGV[1]
local entry = worker_entry(KEYS[2], worker)
if not entry or entry.incarnation ~= ARGV[2] then return { 'EVICTED', entry and 'replaced' or 'unknown' } end
if entry.state ~= 'active' then return { 'EVICTED', entry.state } end
if entry.unit then return { 'OK', tonumber(entry.unit) } end

local unit
local all = redis.call('HGETALL', KEYS[3])
for i = 1, #all, 2 do
  local number = all[i + 1] == 'free' and whole(all[i])
  if number and (not unit or number < unit) then unit = number end
end
local fresh = tonumber(redis.call('HGET', KEYS[3], 'next') or '0')
if not unit and fresh < total then
  unit = fresh
  redis.call('HSET', KEYS[3], 'next', count(fresh + 1))
end
if not unit then
  local done = tonumber(redis.call('HGET', KEYS[3], 'done') or '0')
  return { done == total and 'DONE' or 'NONE' }
end
entry.unit = count(unit)
redis.call('HSET', KEYS[3], entry.unit, worker .. ' computes')
redis.call('HSET', KEYS[2], worker, cjson.encode(entry))
return { 'OK', unit }
