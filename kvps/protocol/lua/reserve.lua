-- reserve: find an id for a worker that has none, unless it may have to replace a worker: then the caller must look at
-- all workers. Each call reserves another id, so that 1,000 workers that start at once do not all try the same one. A
-- caller that looks at all workers also finds ids that were reserved and never used.
-- KEYS[1] version hash, [2] config hash, [3] workers hash, [4] pushed zset, [5] heartbeat zset
-- ARGV[1] job id
-- Returns {OK, worker} | {LOOK} | {NOJOB} | {ANOTHER} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'hash', 'hash', 'zset', 'zset' })
if bad then return bad end
local at = redis.call('HMGET', KEYS[1], 'id', 'free_id')
local another = another_job(at[1])
if another then return another end
local config = redis.call('HMGET', KEYS[2], 'workers', 'worker_timeout_ms')
local wanted, number = whole(config[1]), tonumber(at[2] or '0')
while redis.call('HEXISTS', KEYS[3], 'w' .. count(number)) == 1 do number = number + 1 end
local joined = redis.call('HLEN', KEYS[3])
if number >= wanted or joined >= wanted or redis.call('ZCARD', KEYS[4]) < joined then return { 'LOOK' } end
-- A worker that has been silent for half the timeout may be dead, and then its id is the one to take.
local since = now_ms() - whole(config[2]) / 2
for _, silent in ipairs(redis.call('ZRANGEBYSCORE', KEYS[5], '-inf', since, 'LIMIT', 0, 2)) do
  if silent ~= '' then return { 'LOOK' } end
end
redis.call('HSET', KEYS[1], 'free_id', count(number + 1))
return { 'OK', 'w' .. count(number) }
