-- evict: take silent workers, and one that is known to be dead, out of the vector clock. If no caller has looked for
-- long, Redis or the network may have been away: then no silent worker is evicted, and all get a new start. A time
-- that lies in the future counts as now: the server's clock was set back. Each aggregator calls this now and then, so
-- it also notes that the caller is there.
-- KEYS[1] version hash, [2] config hash, [3] workers hash, [4] heartbeat zset, [5] commits stream, [6] units hash,
--     [7] free units zset, [8] rounds zset, [9] pushed zset, [10] draining zset, [11] turns stream,
--     [12] aggregators zset
-- ARGV[1] job id   [2] the worker that is known to be dead, or ''   [3] its incarnation   [4] the calling aggregator,
--     or ''
-- Returns {OK, ms by which the latest time lay in the future, evicted worker...} | {NOJOB} | {ANOTHER}
--     | {RESTARTED} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'hash', 'hash', 'zset', 'stream', 'hash', 'zset', 'zset', 'zset', 'zset', 'stream',
  'zset' })
if bad then return bad end
local at = redis.call('HMGET', KEYS[1], 'id', 'run_id')
local refused = another_job(at[1]) or restarted(at[2])
if refused then return refused end
local keys = { units = KEYS[6], free_units = KEYS[7], rounds = KEYS[8], pushed = KEYS[9], draining = KEYS[10] }
local timeout = whole(redis.call('HGET', KEYS[2], 'worker_timeout_ms'))
local now, lowest = now_ms(), lowest_round(KEYS[8])
local latest = redis.call('ZRANGE', KEYS[4], -1, -1, 'WITHSCORES')[2]
local ahead = math.max(0, tonumber(latest or '0') - now)
local looked = tonumber(redis.call('ZSCORE', KEYS[4], '') or '0')
local away = now - looked > timeout / 2
redis.call('ZREM', KEYS[4], '') -- allowed when memory is full, and lets the script write
local out = { 'OK', ahead }
local function put_out(worker, entry)
  local state = depart(worker, entry, 'evicted', keys)
  drop_unit(entry, keys)
  redis.call('HSET', KEYS[3], worker, cjson.encode(entry))
  redis.call('ZREM', KEYS[4], worker)
  redis.call('XADD', KEYS[5], '*', 'kind', 'evict', 'worker', worker, 'incarnation', entry.incarnation, 'state', state)
  out[#out + 1] = worker
end
local dead = worker_entry(KEYS[3], ARGV[2])
if dead and counts(dead) and dead.incarnation == ARGV[3] then put_out(ARGV[2], dead) end
local from = away and '-inf' or '(' .. count(now)
for _, worker in ipairs((away or ahead > 0) and redis.call('ZRANGEBYSCORE', KEYS[4], from, '+inf') or {}) do
  redis.call('ZADD', KEYS[4], now, worker)
end
-- Workers that have not joined since the job was restored are awaited, not silent.
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', '(' .. count(now - timeout))) do
  local entry = worker_entry(KEYS[3], worker)
  if entry and counts(entry) and not entry.awaited then put_out(worker, entry) else redis.call('ZREM', KEYS[4], worker) end
end
redis.call('ZADD', KEYS[4], now, '')
if ARGV[4] ~= '' then
  redis.call('ZREMRANGEBYSCORE', KEYS[12], '-inf', '(' .. count(now - timeout))
  redis.call('ZADD', KEYS[12], now, ARGV[4])
end
if #out > 2 then wake(KEYS[11], lowest_round(KEYS[8]) or lowest) end
return out
