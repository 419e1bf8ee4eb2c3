-- evict: take the silent out of the vector clock. If the looker himself was away for long, Redis or the network may
-- have been: then nobody is judged by that silence, and all get a new start.
-- KEYS[1] config hash, [2] workers hash, [3] heartbeat zset, [4] commits stream
-- Returns {OK, evicted worker...} | {NOJOB} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'hash', 'zset', 'stream' })
if bad then return bad end
local timeout = whole(redis.call('HGET', KEYS[1], 'worker_timeout_ms') or '')
if not timeout then return { 'NOJOB' } end
local now, out = now_ms(), { 'OK' }
local looked = tonumber(redis.call('ZSCORE', KEYS[3], '') or '0')
local away = now - looked > timeout / 2
local all = redis.call('HGETALL', KEYS[2])
for i = 1, #all, 2 do
  local worker, entry = all[i], cjson.decode(all[i + 1])
  if entry.state == 'active' and away then
    redis.call('ZADD', KEYS[3], now, worker)
  elseif entry.state == 'active' and now - tonumber(redis.call('ZSCORE', KEYS[3], worker) or '0') > timeout then
    entry.state = entry.pending > 0 and 'draining' or 'gone'
    redis.call('HSET', KEYS[2], worker, cjson.encode(entry))
    redis.call('ZREM', KEYS[3], worker)
    redis.call('XADD', KEYS[4], '*', 'kind', 'evict', 'worker', worker, 'incarnation', entry.incarnation,
      'state', entry.state)
    out[#out + 1] = worker
  end
end
redis.call('ZADD', KEYS[3], now, '')
return out
