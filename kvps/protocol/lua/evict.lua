-- evict: take silent workers, and one that is known to be dead, out of the vector clock. If no caller has looked for
-- long, Redis or the network may have been away: then no silent worker is evicted, and all get a new start. A time
-- that lies in the future counts as now: the server's clock was set back. Each aggregator calls this now and then, so
-- it also notes that the caller is there.
-- KEYS version:hash config:hash workers:hash heartbeat:zset commits:stream units:hash free_units:zset
-- KEYS taken_units:zset rounds:zset pushed:zset draining:zset turns:stream aggregators:zset never
-- ARGV job dead incarnation reason aggregator
--   dead: the worker whose incarnation is known to be dead, or ''
--   reason: why that is evicted, for the log
--   aggregator: the caller, or ''
-- USES job log numbers time turns units workers
-- Returns {OK, ms by which the latest time lay in the future, evicted worker...} | {NOJOB} | {ANOTHER}
--     | {RESTARTED} | {WRONGTYPE, key, is, want}
local refused = read_job(job)
if refused then return refused end
local timeout_ms = whole(redis.call('HGET', keys.config, 'worker_timeout_ms'))
local now, lowest = now_ms(), lowest_round()
local _, latest = unpack(redis.call('ZRANGE', keys.heartbeat, -1, -1, 'WITHSCORES'))
local ahead = math.max(0, tonumber(latest or '0') - now)
local last_look = tonumber(redis.call('ZSCORE', keys.heartbeat, '') or '0')
local away = now - last_look > timeout_ms / 2
redis.call('ZREM', keys.heartbeat, '') -- allowed when memory is full, and lets the script write
local reply = { 'OK', ahead }
local function evict(worker, entry, why)
  local state = depart(worker, entry, 'evicted')
  drop_unit(worker, entry)
  write_worker(worker, entry)
  redis.call('ZREM', keys.heartbeat, worker)
  log_entry('evict', 'worker', worker, 'incarnation', entry.incarnation, 'state', state, 'reason', why)
  reply[#reply + 1] = worker
end
local entry = read_worker(dead)
if entry and in_clock(entry) and entry.incarnation == incarnation then evict(dead, entry, reason) end
if away or ahead > 0 then
  local from = away and '-inf' or '(' .. digits(now)
  for _, worker in ipairs(redis.call('ZRANGEBYSCORE', keys.heartbeat, from, '+inf', 'LIMIT', 0, MOST_IDS)) do
    redis.call('ZADD', keys.heartbeat, now, worker)
  end
end
-- Workers that have not joined since the job was restored are awaited, not silent.
local silent_since = '(' .. digits(now - timeout_ms)
local silent = away and {} or redis.call('ZRANGEBYSCORE', keys.heartbeat, '-inf', silent_since, 'WITHSCORES',
  'LIMIT', 0, MOST_IDS)
for i = 1, #silent, 2 do
  local worker, silent_s = silent[i], (now - tonumber(silent[i + 1])) / 1000
  local entry = read_worker(worker)
  if entry and in_clock(entry) and not entry.awaited then
    evict(worker, entry, string.format('no sign of life for %.1f s', silent_s))
  else
    redis.call('ZREM', keys.heartbeat, worker)
  end
end
redis.call('ZADD', keys.heartbeat, now, '')
if aggregator ~= '' then
  redis.call('ZREMRANGEBYSCORE', keys.aggregators, '-inf', silent_since)
  local future = redis.call('ZRANGEBYSCORE', keys.aggregators, '(' .. digits(now), '+inf', 'LIMIT', 0, MOST_IDS)
  for _, other in ipairs(future) do
    redis.call('ZADD', keys.aggregators, now, other)
  end
  redis.call('ZADD', keys.aggregators, now, aggregator)
end
if #reply > 2 then wake(lowest_round() or lowest) end
return reply
