-- reserve: find an id for a worker that has none, unless it may have to replace a worker: then the caller must look at
-- all workers. Each call reserves another id, so that 1,000 workers that start at once do not all try the same one. A
-- caller that looks at all workers also finds ids that were reserved and never used.
-- KEYS version:hash config:hash workers:hash pushed:zset heartbeat:zset never
-- ARGV job
-- USES job numbers time
-- Returns {OK, worker} | {LOOK} | {NOJOB} | {ANOTHER} | {WRONGTYPE, key, is, want}
local id, free_id = unpack(redis.call('HMGET', keys.version, 'id', 'free_id'))
local another = another_job(id, job)
if another then return another end
local workers, timeout_ms = unpack(redis.call('HMGET', keys.config, 'workers', 'worker_timeout_ms'))
local wanted, joined = whole(workers) or 0, redis.call('HLEN', keys.workers)
local number = lowest_free(keys.workers, 'w', free_id or '0', wanted - 1)
if not number or joined >= wanted or redis.call('ZCARD', keys.pushed) < joined then return { 'LOOK' } end
-- A worker that has been silent for half the timeout may be dead, and then its id is the one to take.
local since = now_ms() - whole(timeout_ms) / 2
for _, silent in ipairs(redis.call('ZRANGEBYSCORE', keys.heartbeat, '-inf', since, 'LIMIT', 0, 2)) do
  if silent ~= '' then return { 'LOOK' } end
end
redis.call('HSET', keys.version, 'free_id', digits(number + 1))
return { 'OK', 'w' .. digits(number) }
