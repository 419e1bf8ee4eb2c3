-- push: accept a contribution whose bytes the server has confirmed; a repeat gets the first answer. A late one may be
-- dropped: its sequence number is used up all the same, so that nothing else is ever stored under its names.
-- KEYS[1] version hash, [2] config hash, [3] workers hash, [4] clock hash, [5] skip hash, [6] heartbeat zset,
--     [7] inbox stream, [8] trace stream, [9] units hash, [10] pushed zset, [11] plan hash
-- ARGV[1] job id   [2] worker   [3] incarnation   [4] seq   [5] base version   [6] weight (0: counts as zeros)
--     [7] digests, one a shard, or '-'   [8] history   [9] the unit it used, or ''
--     [10] 'ask': change nothing, and only say whether it was accepted before
--     [11] the part of the model that it is of, or '' for all of it
--     [12...] the traces of earlier iterations of the worker, "field value field value ..." each
-- Returns {ACK, clock, round, sum of the weights that were accepted from this worker, where rounds end by the clock}
--     | {LATE, version}: dropped | {NEW} (to 'ask') | {FULL, pending} | {EVICTED, state} | {SEQUENCE, accepted}
--     | {BASE, version} | {HISTORY, history} | {RESTARTED} | {UNIT, unit that the worker has}
--     | {BAD}: a malformed digest, weight or part | {NOJOB} | {ANOTHER} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'hash', 'hash', 'hash', 'hash', 'zset', 'stream', 'stream', 'hash', 'zset',
  'hash' })
if bad then return bad end
local at = redis.call('HMGET', KEYS[1], 'id', 'version', 'history', 'run_id')
local another = another_job(at[1])
if another then return another end
local config = redis.call('HMGET', KEYS[2], 'max_pending', 'units', 'late', 'reduction', 'local_steps', 'workers')
local worker, seq, base = ARGV[2], whole(ARGV[4]), whole(ARGV[5])
local entry = worker_entry(KEYS[3], worker)
if not entry or entry.incarnation ~= ARGV[3] then return { 'EVICTED', entry and 'replaced' or 'unknown' } end
-- Checked before the state: an accepted contribution stays acknowledged, also to a worker that was evicted since.
if seq and seq == entry.accepted and seq > 0 then
  return seq == entry.late and { 'LATE', at[2] } or { 'ACK', entry.acked, entry.round, weight_sum(entry) }
end
if entry.state ~= 'active' then return { 'EVICTED', entry.state } end
local lost = restarted(at[4])
if lost then return lost end
if ARGV[10] == 'ask' then return { 'NEW' } end
if seq ~= entry.accepted + 1 then return { 'SEQUENCE', entry.accepted } end
if at[3] ~= ARGV[8] then return { 'HISTORY', at[3] } end
if not base or base > whole(at[2]) then return { 'BASE', at[2] } end
local weight = whole(ARGV[6])
-- A reduction of the user's own, module:function, may use weights too.
local reduction = config[4] or ''
local takes_weights = reduction == 'weighted' or (reduction:find(':', 1, true) and not reduction:find('^trimmed:'))
local part = ARGV[11]
if not ARGV[7]:find('^[%x,-]+$') or not part:find('^[%w_-]*$') or #part > 64 or not weight
  or (weight > 1 and not takes_weights) then return { 'BAD' } end
if ARGV[9] ~= (entry.unit or '') or (config[2] ~= '0' and not entry.unit) then return { 'UNIT', entry.unit or '' } end
-- An open plan has closed the round, too: what it does not have would wait for the next one.
if config[3] == 'drop' and (base < whole(at[2]) or redis.call('EXISTS', KEYS[11]) == 1) then
  entry.accepted, entry.late, entry.dropped = seq, seq, (entry.dropped or 0) + 1
  redis.call('HSET', KEYS[3], worker, cjson.encode(entry))
  redis.call('ZADD', KEYS[6], now_ms(), worker)
  return { 'LATE', at[2] }
end
local clock = tonumber(redis.call('HGET', KEYS[4], worker) or '0')
local pending = entry.round - clock - tonumber(redis.call('HGET', KEYS[5], worker) or '0')
if pending >= whole(config[1]) then return { 'FULL', pending } end

entry.accepted, entry.acked, entry.round = seq, clock + pending + 1, entry.round + 1
if config[5] == 'auto' then weigh(entry, weight, whole(config[1])) end
local round = count(entry.round)
-- This text goes into the plan and the log as it is: no script takes it apart and puts it together again.
local text = table.concat({ worker, entry.incarnation, count(seq), round, count(base), ARGV[6], entry.unit or '-',
  ARGV[7], part ~= '' and part or nil }, ' ')
redis.call('XADD', KEYS[7], '*', 'rank', count(entry.rank), 'round', round, 'contribution', text)
if entry.unit then redis.call('HSET', KEYS[9], entry.unit, worker .. ' pushed') end
entry.unit, entry.residual = nil, nil
redis.call('HSET', KEYS[3], worker, cjson.encode(entry))
redis.call('ZADD', KEYS[6], now_ms(), worker)
redis.call('ZADD', KEYS[10], round, worker)
append(KEYS[8], ARGV, 12, whole(config[6]))
return { 'ACK', entry.acked, entry.round, weight_sum(entry) }
