-- heartbeat: a sign of life of one incarnation, by the server's clock.
-- KEYS[1] workers hash, [2] heartbeat zset
-- ARGV[1] worker   [2] incarnation
-- Returns {OK} | {EVICTED, state} | {NOJOB} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'zset' })
if bad then return bad end
local entry = worker_entry(KEYS[1], ARGV[1])
if not entry then return { 'NOJOB' } end
if entry.incarnation ~= ARGV[2] or entry.state ~= 'active' then return { 'EVICTED', entry.state } end
redis.call('ZREM', KEYS[2], ARGV[1]) -- allowed when memory is full, and lets the script write
redis.call('ZADD', KEYS[2], now_ms(), ARGV[1])
return { 'OK' }
