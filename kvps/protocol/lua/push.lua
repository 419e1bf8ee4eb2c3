-- push: accept a contribution whose bytes the server has confirmed; a repeat gets the first answer. A late one may be
-- dropped: its sequence number is used up all the same, so that nothing else is ever stored under its names.
-- KEYS version:hash config:hash workers:hash clock:hash skip:hash
-- KEYS heartbeat:zset inbox:stream trace(worker):stream commits:stream pushed:zset rounds:zset losses:hash
-- KEYS units:hash? taken_units:zset? free_units:zset? states:hash? plan never
-- READS version config workers clock skip rounds heartbeat
-- ARGV job worker incarnation seq base weight digests history unit mode part lacks state traces...
--   base: the version that it was computed on
--   weight: 0 counts as zeros
--   digests: one a shard, or '-'
--   unit: the unit of data that it used, or ''; state: what the worker's user keeps, as JSON; '' if it is as before
--   mode: 'ask' to change nothing, and only say whether it was accepted before
--   part: the part of the model that it is of, or '' for all of it; lacks: parameters without a gradient, as '0-3,7'
--   traces: of earlier iterations of the worker, "field value field value ..." each
-- USES job log names numbers run_control staleness states time traces unit_rounds units weights workers
-- Returns {ACK, clock, round, 1 if a unit may be had at once, else 0} | {LATE, version}: dropped
--     | {DUPLICATE, version}: another worker has pushed its unit before, and that counts | {NEW} (to 'ask') | {FULL, pending}
--     | {STOPPED, run, by, reason, ms}: the job ends, as control says, with an earlier round | {EVICTED, state} | {SEQUENCE, accepted}
--     | {BASE, version} | {HISTORY, history} | {RESTARTED} | {UNIT, unit that the worker has}
--     | {BAD}: a malformed digest, weight, part or lacks | {NOJOB} | {ANOTHER} | {WRONGTYPE, key, is, want}
local id, version, present_history, run_id, run = unpack(redis.call('HMGET', keys.version,
  'id', 'version', 'history', 'run_id', 'run'))
local another = another_job(id, job)
if another then return another end
local closes, bound, rounds, max_pending, units, late, reduction, workers =
  read_rule('max_pending', 'units', 'late', 'reduction', 'workers')
local seq, base = whole(seq), whole(base)
local entry = read_worker(worker)
if not entry or entry.incarnation ~= incarnation then return { 'EVICTED', entry and 'replaced' or 'unknown' } end
-- Checked before the state: an accepted contribution stays acknowledged, also to a worker that was evicted since.
if seq and seq == entry.accepted and seq > 0 then
  if seq == entry.late then return { late == 'drop' and 'LATE' or 'DUPLICATE', version } end
  return { 'ACK', entry.acked, entry.round, 1 }
end
if entry.state ~= 'active' then return { 'EVICTED', entry.state } end
local lost = restarted(run_id)
if lost then return lost end
if mode == 'ask' then return { 'NEW' } end
if seq ~= entry.accepted + 1 then return { 'SEQUENCE', entry.accepted } end
if present_history ~= history then return { 'HISTORY', present_history } end
if not base or base > whole(version) then return { 'BASE', version } end
local weight_number = whole(weight)
if not digests:find('^[%x,-]+$') or (part ~= '' and not is_name(part)) or (lacks ~= '' and not are_ranges(lacks))
  or not weight_number or (weight_number > 1 and not takes_weights(reduction or '')) then return { 'BAD' } end
if unit ~= (entry.unit or '') or (units ~= '0' and not entry.unit) then return { 'UNIT', entry.unit or '' } end
if rounds then
  local state = redis.call('HGET', keys.units, unit) -- a unit that is committed has none
  if not state or state:find(' pushed', 1, true) then
    entry.accepted, entry.late, entry.dropped, entry.unit = seq, seq, (entry.dropped or 0) + 1, nil
    redis.call('ZADD', keys.heartbeat, now_ms(), worker)
    write_worker(worker, entry)
    log_entry('duplicate', 'unit', unit, 'worker', worker, 'incarnation', incarnation, 'seq', digits(seq))
    return { 'DUPLICATE', version }
  end
  local round = round_of(rounds, tonumber(unit))
  if base > round or base < round - bound then return { 'BASE', version } end
end
if is_over(run, closes, bound, version, entry.round) then return run_answer('STOPPED') end
if late == 'drop' and base < closed_rounds(version) then
  entry.accepted, entry.late, entry.dropped = seq, seq, (entry.dropped or 0) + 1
  redis.call('ZADD', keys.heartbeat, now_ms(), worker)
  write_worker(worker, entry)
  return { 'LATE', version }
end
local clock = tonumber(redis.call('HGET', keys.clock, worker) or '0')
local pending = entry.round - clock - tonumber(redis.call('HGET', keys.skip, worker) or '0')
if pending >= whole(max_pending) then return { 'FULL', pending } end
-- In BSP with a quorum this worker skips the rounds made without it, unless something waits: a skip would commit that.
local missed = closes == 'quorum' and bound == 0 and pending == 0 and base - entry.round or 0
local now, committed = now_ms(), missed > 0 and redis.call('ZSCORE', keys.rounds, worker) or 0
redis.call('ZADD', keys.heartbeat, now, worker)
if missed > 0 then
  move_state(worker, entry.round + 1, base + 1)
  entry.round = base
  redis.call('HINCRBY', keys.skip, worker, missed)
  redis.call('ZADD', keys.rounds, committed + missed, worker)
end
entry.accepted, entry.acked, entry.round = seq, clock + pending + 1, entry.round + 1
local round = digits(entry.round)
-- This text goes into the plan and the log as it is: no script takes it apart and puts it together again.
local text = table.concat({ worker, incarnation, digits(seq), round, digits(base), weight, entry.unit or '-',
  digests, part ~= '' and part or nil }, ' ') .. (lacks ~= '' and ' lacks:' .. lacks or '')
local fields = { 'rank', digits(entry.rank), 'round', round, 'arrived', digits(now), 'contribution', text }
local taken = entry.unit and note_pushed(worker, entry.unit)
if rounds then
  local took = taken and digits(math.max(0, now - taken)) or ''
  for _, each in ipairs({ 'unit', unit, 'took', took }) do table.insert(fields, each) end
end
redis.call('XADD', keys.inbox, '*', unpack(fields))
entry.unit, entry.residual = nil, nil
if state ~= '' then redis.call('HSET', keys.states, waiting(worker, entry.round), state) end
write_worker(worker, entry)
redis.call('ZADD', keys.pushed, round, worker)
note_losses(keys.losses, append_traces(keys.trace, traces, whole(workers)))
local more = not rounds or more_units(rounds, bound, whole(version))
return { 'ACK', entry.acked, entry.round, more and 1 or 0 }
