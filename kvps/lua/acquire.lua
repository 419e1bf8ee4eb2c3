-- acquire: take a shard's lease under a new term, unless another holds it. The lease is for liveness and may
-- expire at any time; safety is the term's, which is compared for equality and never expires.
-- KEYS[1] lease string, [2] term string, [3] version hash, [4] ready hash, [5] leases stream
-- ARGV[1] holder   [2] lease ms   [3] nonce of this call   [4] shard
-- Returns {OK, term} also when repeated | {HELD, holder, ms left} | {NOJOB} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'string', 'string', 'hash', 'hash', 'stream' })
if bad then return bad end
local history = redis.call('HGET', KEYS[3], 'history')
if not history then return { 'NOJOB' } end
local holder, term = redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2])
if holder and holder ~= ARGV[1] then return { 'HELD', holder, redis.call('PTTL', KEYS[1]) } end
local number = term and tonumber(term:match('^%w+%-(%d+)%-')) or 0
if not term or term:match('(%w+)$') ~= ARGV[3] then
  term = history .. '-' .. count(number + 1) .. '-' .. ARGV[3]
end
-- What the last holder had staged is not what this one will stage: a plan must not flip to it. This stands first, for
-- deleting is allowed when memory is full, and lets the script write: taking over must be possible then.
redis.call('HDEL', KEYS[4], ARGV[4])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('SET', KEYS[2], term)
redis.call('XADD', KEYS[5], 'MAXLEN', '~', 1000, '*', 'kind', 'take', 'shard', ARGV[4], 'holder', ARGV[1], 'term', term)
return { 'OK', term }
