-- evict: take the silent out of the vector clock, and one who is known to be dead. If the looker himself was away for long, Redis or the network may
-- have been: then nobody is judged by that silence, and all get a new start.
-- KEYS[1] config hash, [2] workers hash, [3] heartbeat zset, [4] commits stream,
--     [5] units hash
-- ARGV[1] who is known to be dead, or ''   [2] its incarnation
-- Returns {OK, evicted worker...} | {NOJOB} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'hash', 'zset', 'stream', 'hash' })
if bad then return bad end
local timeout = whole(redis.call('HGET', KEYS[1], 'worker_timeout_ms') or '')
if not timeout then return { 'NOJOB' } end
local now, out = now_ms(), { 'OK' }
local looked = tonumber(redis.call('ZSCORE', KEYS[3], '') or '0')
local away = now - looked > timeout / 2
redis.call('ZREM', KEYS[3], '') -- allowed when memory is full, and lets the script write
local all = redis.call('HGETALL', KEYS[2])
for i = 1, #all, 2 do
  local worker, entry = all[i], cjson.decode(all[i + 1])
  local dead = worker == ARGV[1] and entry.incarnation == ARGV[2]
  -- Who has not come yet since the job was restored is awaited as one who has never joined.
  local silent = not entry.awaited and now - tonumber(redis.call('ZSCORE', KEYS[3], worker) or '0') > timeout
  if counts(entry) and away and not dead then
    redis.call('ZADD', KEYS[3], now, worker)
  elseif counts(entry) and (silent or dead) then
    depart(entry, KEYS[5])
    redis.call('HSET', KEYS[2], worker, cjson.encode(entry))
    redis.call('ZREM', KEYS[3], worker)
    redis.call('XADD', KEYS[4], '*', 'kind', 'evict', 'worker', worker, 'incarnation', entry.incarnation,
      'state', entry.state)
    out[#out + 1] = worker
  end
end
redis.call('ZADD', KEYS[3], now, '')
return out
