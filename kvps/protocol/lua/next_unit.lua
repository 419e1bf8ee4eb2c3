-- next_unit: hand a worker the next unit of the data, or the one that it already has. In rounds of units only those of
-- open rounds are handed out; if none is free, a unit that is out for long is handed out a second time.
-- KEYS version:hash config:hash workers:hash units:hash free_units:zset taken_units:zset inbox:stream commits:stream never
-- ARGV job worker incarnation
-- USES job log numbers replies run_control staleness time unit_rounds workers
-- Returns {OK, unit} also when repeated | {NONE, ms}: none is free, and the first may be handed out a second time in so
--     many ms, or 0 | {DONE}: all are committed
--     | {STOPPED, run, by, reason, ms}: the job ends, as control says, and the worker has done its last round
--     | {EVICTED, state} | {NOJOB} | {ANOTHER} | {RESTARTED}
--     | {WRONGTYPE, key, is, want}
local refused, committed, run = read_job(job, 'version', 'run')
if refused then return refused end
local entry = read_worker(worker)
if not entry or entry.incarnation ~= incarnation then return { 'EVICTED', entry and 'replaced' or 'unknown' } end
if entry.state ~= 'active' then return { 'EVICTED', entry.state } end
if entry.unit then return { 'OK', tonumber(entry.unit) } end

local _, bound, rounds, total, factor = read_rule('units', 'backup_after')
local behind = rounds and first_closed_unit(rounds, bound, whole(committed)) or whole(total)
local last = last_round(run)
if last then
  if (rounds and whole(committed) or entry.round) >= last then return run_answer('STOPPED') end
  if rounds then behind = math.min(behind, (units_of(rounds, last))) end
end
local now = now_ms()

-- Returns the unit that is out for longest and that one worker has, and in how many ms it is late: its time is `factor`
-- times the median of those of its round that are done, and 10 ms at the least, because less is a machine's noise.
local function longest_out()
  local unit, taken = unpack(redis.call('ZRANGE', keys.taken_units, 0, 0, 'WITHSCORES'))
  if not unit then return nil end
  local since, times = tonumber(taken), {}
  if since > now then -- the server's clock was set back
    redis.call('ZADD', keys.taken_units, now, unit)
    since = now
  end
  local round = round_of(rounds, tonumber(unit))
  for _, each in ipairs(redis.call('XRANGE', keys.inbox, '-', '+', 'COUNT', 512)) do
    local _, fields = read_entry(each)
    local took = whole(fields.took)
    if took and round_of(rounds, tonumber(fields.unit)) == round then times[#times + 1] = took end
  end
  if #times == 0 then return nil end
  table.sort(times)
  local median = (times[math.ceil(#times / 2)] + times[math.floor(#times / 2) + 1]) / 2
  return unit, math.ceil(since + math.max(10, factor * median) - now), now - since
end

local unit = unpack(redis.call('ZRANGE', keys.free_units, 0, 0)) -- the lowest that was given back
local fresh = tonumber(redis.call('HGET', keys.units, 'next') or '0')
if not unit and fresh < behind then
  unit = digits(fresh)
  redis.call('HSET', keys.units, 'next', digits(fresh + 1))
end
local before = ''
if not unit then
  if tonumber(redis.call('HGET', keys.units, 'done') or '0') >= whole(total) then return { 'DONE' } end
  factor = tonumber(factor or '0')
  if not rounds or factor == 0 then return { 'NONE', 0 } end
  local late, ms, out_ms = longest_out()
  if not late or ms > 0 then return { 'NONE', late and ms or 0 } end
  unit, before = late, redis.call('HGET', keys.units, late) .. ', '
  redis.call('HINCRBY', keys.version, 'backups', 1)
  log_entry('backup', 'unit', unit, 'worker', worker, 'incarnation', incarnation,
    'of', before:match('^%S+'), 'out_ms', digits(out_ms))
end
entry.unit = unit
redis.call('ZREM', keys.free_units, unit)
redis.call('HSET', keys.units, unit, before .. worker .. ' computes')
if before == '' then redis.call('ZADD', keys.taken_units, now, unit) else redis.call('ZREM', keys.taken_units, unit) end
write_worker(worker, entry)
return { 'OK', tonumber(unit) }
