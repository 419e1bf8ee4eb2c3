-- join: begin a new incarnation of a worker id, admitted at a round that no open plan has passed.
-- KEYS[1] config hash, [2] workers hash, [3] clock hash, [4] heartbeat zset, [5] plan string, [6] commits stream,
--     [7] units hash
-- ARGV[1] worker   [2] nonce of this call   [3] incarnation judged dead, '*' to take over, '' for neither
--     [4] JSON: host, pid, ... of the process
-- Returns {OK, rank, incarnation, round, clock, pending, name of the stored remainder to go on with or ''} also when
--     repeated | {ALIVE, JSON entry}
--     | {COMPLETE, worker...}: all among whom the task's data is divided have joined | {NOJOB} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'hash', 'hash', 'zset', 'string', 'stream', 'hash' })
if bad then return bad end
local config = redis.call('HMGET', KEYS[1], 'worker_timeout_ms', 'workers', 'staleness', 'task', 'units')
if not config[1] then return { 'NOJOB' } end
local worker, now = ARGV[1], now_ms()
local entry = worker_entry(KEYS[2], worker)
local function clock_of(name) return tonumber(redis.call('HGET', KEYS[3], name) or '0') end
local function answer()
  local clock = clock_of(worker)
  return { 'OK', entry.rank, entry.incarnation, clock + entry.skip + entry.pending, clock, entry.pending,
    entry.remainder or '' }
end

if entry and entry.nonce == ARGV[2] then return answer() end
if entry and entry.state == 'active' and ARGV[3] ~= '*' and ARGV[3] ~= entry.incarnation then
  local seen = tonumber(redis.call('ZSCORE', KEYS[4], worker) or '0')
  if now - seen <= whole(config[1]) then return { 'ALIVE', cjson.encode(entry) } end
end
if not entry and config[4] ~= '' and config[5] == '0' and redis.call('HLEN', KEYS[2]) >= whole(config[2]) then
  return { 'COMPLETE', unpack(redis.call('HKEYS', KEYS[2])) }
end

-- In BSP, rounds that the others have behind them, the open plan included, are closed: they were not there for this
-- worker to do. SSP closes none, but it may not come back further behind than the bound lets one fall; ASP never waits.
local planned = {}
local plan = redis.call('GET', KEYS[5])
plan = plan and cjson.decode(plan) or { contributions = {}, rejected = {} }
for _, list in ipairs({ plan.contributions, plan.rejected }) do
  for _, c in ipairs(list) do planned[c.worker] = (planned[c.worker] or 0) + 1 end
end
local least, most, taken = nil, 0, {}
local all = redis.call('HGETALL', KEYS[2])
for i = 1, #all, 2 do
  local other = cjson.decode(all[i + 1])
  local round = clock_of(all[i]) + other.skip + (planned[all[i]] or 0)
  most, taken[other.rank] = math.max(most, round), true
  if all[i] ~= worker and other.state ~= 'gone' then least = math.min(least or round, round) end
end
local clock = clock_of(worker)
local pending = entry and entry.pending or 0
local own = entry and clock + entry.skip + pending or 0
-- With contributions still waiting it goes on where it was: to skip ahead would say that those are committed.
local staleness = tonumber(config[3])
local lag = staleness > 0 and staleness + 1 or 0
local due = staleness < 0 and 0 or (least or most) - lag
local round = pending > 0 and own or math.max(own, due)

if entry then drop_unit(entry, KEYS[7]) end
local fresh = cjson.decode(ARGV[4])
-- w3 gets rank 3 if it can, others the least that is free: so names and numbers agree where nobody asked for less.
local wished = tonumber(worker:match('^w(%d%d?%d?)$'))
if not wished or wished >= whole(config[2]) or taken[wished] then
  wished = 0
  while taken[wished] do wished = wished + 1 end
end
fresh.rank = entry and entry.rank or wished
fresh.life = (entry and entry.life or 0) + 1
fresh.nonce, fresh.incarnation = ARGV[2], count(fresh.life) .. '-' .. ARGV[2]
fresh.state, fresh.accepted, fresh.pending, fresh.skip = 'active', 0, pending, round - clock - pending
fresh.finished, fresh.remainder = false, entry and entry.remainder or nil
entry = fresh
redis.call('HSET', KEYS[2], worker, cjson.encode(entry))
redis.call('HSETNX', KEYS[3], worker, 0)
redis.call('ZADD', KEYS[4], now, worker)
redis.call('XADD', KEYS[6], '*', 'kind', 'join', 'worker', worker, 'incarnation', entry.incarnation,
  'rank', entry.rank, 'round', count(round), 'clock', count(clock), 'remainder', entry.remainder or '')
return answer()
