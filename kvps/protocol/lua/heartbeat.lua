-- heartbeat: note a sign of life of one incarnation, by the server's clock, and what it does.
-- KEYS[1] version hash, [2] workers hash, [3] heartbeat zset, [4] activity hash
-- ARGV[1] job id   [2] worker   [3] incarnation   [4] its phase and since when, or ''
-- Returns {OK} | {EVICTED, state} | {NOJOB} | {ANOTHER} | {RESTARTED} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'hash', 'zset', 'hash' })
if bad then return bad end
local at = redis.call('HMGET', KEYS[1], 'id', 'run_id')
local refused = another_job(at[1]) or restarted(at[2])
if refused then return refused end
local entry = worker_entry(KEYS[2], ARGV[2])
if not entry then return { 'EVICTED', 'unknown' } end
if entry.incarnation ~= ARGV[3] or entry.state ~= 'active' then return { 'EVICTED', entry.state } end
redis.call('ZREM', KEYS[3], ARGV[2]) -- allowed when memory is full, and lets the script write
redis.call('ZADD', KEYS[3], now_ms(), ARGV[2])
redis.call('HSET', KEYS[4], ARGV[2], ARGV[4])
return { 'OK' }
