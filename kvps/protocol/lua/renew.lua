-- renew: keep a shard's lease, or end it. An expired lease is taken again as long as the term is still the caller's.
-- KEYS[1] version hash, [2] lease string, [3] term string, [4] leases stream, which wakes standbys
-- ARGV[1] job id   [2] holder   [3] term   [4] lease ms, 0 to give it up
-- Returns {OK} | {LOST, holder or ''} | {NOJOB} | {ANOTHER} | {RESTARTED} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'string', 'string', 'stream' })
if bad then return bad end
local at = redis.call('HMGET', KEYS[1], 'id', 'run_id')
local refused = another_job(at[1]) or restarted(at[2])
if refused then return refused end
local holder = redis.call('GET', KEYS[2])
if redis.call('GET', KEYS[3]) ~= ARGV[3] or (holder and holder ~= ARGV[2]) then return { 'LOST', holder or '' } end
redis.call('DEL', KEYS[2]) -- allowed when memory is full, and lets the script write
if ARGV[4] == '0' then
  redis.call('XADD', KEYS[4], 'MAXLEN', '~', 1000, '*', 'kind', 'release', 'holder', ARGV[2], 'term', ARGV[3])
else
  redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[4])
end
return { 'OK' }
