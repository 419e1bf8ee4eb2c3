-- next_unit: hand a worker the next unit of the data, or the one that it already has.
-- KEYS[1] version hash, [2] config hash, [3] workers hash, [4] units hash, [5] free units zset
-- ARGV[1] job id   [2] worker   [3] incarnation
-- Returns {OK, unit} also when repeated | {NONE}: other workers have all that are left | {DONE}: all are committed
--     | {EVICTED, state} | {NOJOB} | {ANOTHER} | {RESTARTED} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'hash', 'hash', 'hash', 'zset' })
if bad then return bad end
local at = redis.call('HMGET', KEYS[1], 'id', 'run_id')
local refused = another_job(at[1]) or restarted(at[2])
if refused then return refused end
local worker, total = ARGV[2], whole(redis.call('HGET', KEYS[2], 'units'))
local entry = worker_entry(KEYS[3], worker)
if not entry or entry.incarnation ~= ARGV[3] then return { 'EVICTED', entry and 'replaced' or 'unknown' } end
if entry.state ~= 'active' then return { 'EVICTED', entry.state } end
if entry.unit then return { 'OK', tonumber(entry.unit) } end

local unit = redis.call('ZRANGE', KEYS[5], 0, 0)[1] -- the lowest that was given back
local fresh = tonumber(redis.call('HGET', KEYS[4], 'next') or '0')
if not unit and fresh < total then
  unit = count(fresh)
  redis.call('HSET', KEYS[4], 'next', count(fresh + 1))
end
if not unit then
  local done = tonumber(redis.call('HGET', KEYS[4], 'done') or '0')
  return { done == total and 'DONE' or 'NONE' }
end
entry.unit = unit
redis.call('ZREM', KEYS[5], unit)
redis.call('HSET', KEYS[4], unit, worker .. ' computes')
redis.call('HSET', KEYS[3], worker, cjson.encode(entry))
return { 'OK', tonumber(unit) }
