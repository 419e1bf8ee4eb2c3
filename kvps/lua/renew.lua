-- renew: keep a shard's lease, or end it. A lease that had only expired is taken again: the term is still its own.
-- KEYS[1] lease string, [2] term string, [3] leases stream, the bell of standbys
-- ARGV[1] holder   [2] term   [3] lease ms, 0 to give it up
-- Returns {OK} | {LOST, holder or ''} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'string', 'string', 'stream' })
if bad then return bad end
local holder = redis.call('GET', KEYS[1])
if redis.call('GET', KEYS[2]) ~= ARGV[2] or (holder and holder ~= ARGV[1]) then return { 'LOST', holder or '' } end
redis.call('DEL', KEYS[1]) -- allowed when memory is full, and lets the script write
if ARGV[3] == '0' then
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', 1000, '*', 'kind', 'release', 'holder', ARGV[1], 'term', ARGV[2])
else
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
end
return { 'OK' }
