-- next_unit: hand a worker the next unit of the data, or the one that it already has.
-- KEYS version:hash config:hash workers:hash units:hash free_units:zset never
-- ARGV job worker incarnation
-- USES job numbers workers
-- Returns {OK, unit} also when repeated | {NONE}: other workers have all that are left | {DONE}: all are committed
--     | {EVICTED, state} | {NOJOB} | {ANOTHER} | {RESTARTED} | {WRONGTYPE, key, is, want}
local refused = read_job(job)
if refused then return refused end
local total = whole(redis.call('HGET', keys.config, 'units'))
local entry = read_worker(worker)
if not entry or entry.incarnation ~= incarnation then return { 'EVICTED', entry and 'replaced' or 'unknown' } end
if entry.state ~= 'active' then return { 'EVICTED', entry.state } end
if entry.unit then return { 'OK', tonumber(entry.unit) } end

local unit = unpack(redis.call('ZRANGE', keys.free_units, 0, 0)) -- the lowest that was given back
local fresh = tonumber(redis.call('HGET', keys.units, 'next') or '0')
if not unit and fresh < total then
  unit = digits(fresh)
  redis.call('HSET', keys.units, 'next', digits(fresh + 1))
end
if not unit then
  local done = tonumber(redis.call('HGET', keys.units, 'done') or '0')
  return { done == total and 'DONE' or 'NONE' }
end
entry.unit = unit
redis.call('ZREM', keys.free_units, unit)
redis.call('HSET', keys.units, unit, worker .. ' computes')
write_worker(worker, entry)
return { 'OK', tonumber(unit) }
