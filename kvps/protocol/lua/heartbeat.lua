-- heartbeat: note a sign of life of one incarnation, by the server's clock, and what it does.
-- KEYS version:hash workers:hash heartbeat:zset activity:hash never
-- ARGV job worker incarnation phase
--   phase: of its iteration, and since when; or ''
-- USES job time workers
-- Returns {OK} | {EVICTED, state} | {NOJOB} | {ANOTHER} | {RESTARTED} | {WRONGTYPE, key, is, want}
local refused = read_job(job)
if refused then return refused end
local entry = read_worker(worker)
if not entry then return { 'EVICTED', 'unknown' } end
if entry.incarnation ~= incarnation or entry.state ~= 'active' then return { 'EVICTED', entry.state } end
redis.call('ZREM', keys.heartbeat, worker) -- allowed when memory is full, and lets the script write
redis.call('ZADD', keys.heartbeat, now_ms(), worker)
redis.call('HSET', keys.activity, worker, phase)
return { 'OK' }
