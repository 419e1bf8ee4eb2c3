-- join: begin a new incarnation of a worker id, and admit it at a round after the open plan.
-- KEYS[1] version hash, [2] config hash, [3] workers hash, [4] clock hash, [5] skip hash, [6] heartbeat zset,
--     [7] plan hash, [8] commits stream, [9] units hash, [10] free units zset, [11] rounds zset, [12] pushed zset,
--     [13] draining zset, [14] finished set, [15] ranks hash, [16] turns stream
-- ARGV[1] job id   [2] worker   [3] nonce of this call   [4] incarnation judged dead, '*' to take over, '' for neither
--     [5] JSON: host, pid, ... of the process
-- Returns {OK, rank, incarnation, round, clock, pending, name of the stored residual that it inherits or '', sum of
--     weights as in push} also when repeated | {ALIVE, JSON entry}: the id belongs to a living worker | {COMPLETE,
--     worker...}: these divide the task's data and all have joined | {NOJOB} | {ANOTHER} | {RESTARTED} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'hash', 'hash', 'hash', 'hash', 'zset', 'hash', 'stream', 'hash', 'zset', 'zset',
  'zset', 'zset', 'set', 'hash', 'stream' })
if bad then return bad end
local at = redis.call('HMGET', KEYS[1], 'id', 'version', 'furthest', 'free_rank', 'run_id')
local refused = another_job(at[1]) or restarted(at[5])
if refused then return refused end
local config = redis.call('HMGET', KEYS[2], 'worker_timeout_ms', 'workers', 'staleness', 'task', 'units',
  'quorum')
local worker, now, wanted = ARGV[2], now_ms(), whole(config[2])
local entry = worker_entry(KEYS[3], worker)
local clock = tonumber(redis.call('HGET', KEYS[4], worker) or '0')
local committed = clock + tonumber(redis.call('HGET', KEYS[5], worker) or '0')
local pending = entry and entry.round - committed or 0
local function answer()
  return { 'OK', entry.rank, entry.incarnation, entry.round, clock, pending, entry.residual or '', weight_sum(entry) }
end

if entry and entry.nonce == ARGV[3] then return answer() end
if entry and entry.state == 'active' and ARGV[4] ~= '*' and ARGV[4] ~= entry.incarnation then
  local seen = tonumber(redis.call('ZSCORE', KEYS[6], worker) or '0')
  if seen > now then redis.call('ZADD', KEYS[6], now, worker) end -- the server's clock was set back
  if now - seen <= whole(config[1]) then return { 'ALIVE', cjson.encode(entry) } end
end
local joined = redis.call('HLEN', KEYS[3])
if not entry and config[4] ~= '' and config[5] == '0' and joined >= wanted then
  local out = redis.call('HKEYS', KEYS[3])
  table.insert(out, 1, 'COMPLETE')
  return out
end

-- In BSP, the rounds that the others have finished, including the open plan's, are closed, and this worker skips them.
-- SSP closes no round, but a worker may not come back further behind than the bound allows. Others never wait for it.
local staleness, due = tonumber(config[3]), 0
if staleness == 0 and config[6] == '0' then
  due = whole(at[2]) + redis.call('EXISTS', KEYS[7])
elseif staleness > 0 then
  local two = redis.call('ZRANGE', KEYS[11], 0, 1, 'WITHSCORES')
  local others = two[1] == worker and two[4] or two[1] ~= worker and two[2]
  due = tonumber(others or at[3]) - staleness - 1
end
-- A worker with waiting contributions continues at its old round: skipping ahead would count them as committed.
local round = pending > 0 and entry.round or math.max(committed, due)

local freed = entry and drop_unit(entry, { units = KEYS[9], free_units = KEYS[10] })
local fresh = cjson.decode(ARGV[5])
-- w3 gets rank 3 if that is free and below `workers`, other ids the lowest free rank: so ids and ranks mostly agree.
local rank = entry and entry.rank or tonumber(worker:match('^w(%d%d?%d?)$'))
if not entry and (not rank or rank >= wanted or redis.call('HEXISTS', KEYS[15], count(rank)) == 1) then
  rank = tonumber(at[4])
  while redis.call('HEXISTS', KEYS[15], count(rank)) == 1 do rank = rank + 1 end
  redis.call('HSET', KEYS[1], 'free_rank', count(rank))
end
fresh.rank, fresh.incarnations = rank, (entry and entry.incarnations or 0) + 1
fresh.nonce, fresh.incarnation = ARGV[3], count(fresh.incarnations) .. '-' .. ARGV[3]
fresh.state, fresh.accepted, fresh.round = 'active', 0, round
fresh.finished, fresh.residual, fresh.weight_sums = false, entry and entry.residual or nil, entry and entry.weight_sums or nil
entry = fresh
redis.call('HSET', KEYS[3], worker, cjson.encode(entry))
redis.call('HSET', KEYS[15], count(rank), worker)
redis.call('HSETNX', KEYS[4], worker, 0)
redis.call('HSET', KEYS[5], worker, count(round - pending - clock))
redis.call('ZADD', KEYS[6], now, worker)
redis.call('ZADD', KEYS[11], round - pending, worker)
redis.call('ZADD', KEYS[12], round, worker)
redis.call('ZREM', KEYS[13], worker)
redis.call('SREM', KEYS[14], worker)
redis.call('XADD', KEYS[8], '*', 'kind', 'join', 'worker', worker, 'incarnation', entry.incarnation,
  'rank', count(rank), 'round', count(round), 'clock', count(clock), 'residual', entry.residual or '')
-- Workers wait before their second round until all have joined, and a worker without a unit waits for a freed one.
if freed or (joined < wanted and redis.call('HLEN', KEYS[3]) == wanted) then wake(KEYS[16], lowest_round(KEYS[11])) end
return answer()
