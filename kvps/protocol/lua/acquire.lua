-- acquire: take a shard's lease under a new term, unless another holds it. The lease is for liveness and may expire at
-- any time. The term makes commits safe: it is compared for equality and never expires.
-- KEYS[1] version hash, [2] lease string, [3] term string, [4] ready hash, [5] leases stream
-- ARGV[1] job id   [2] holder   [3] lease ms   [4] nonce of this call   [5] shard
-- Returns {OK, term} also when repeated | {HELD, holder, ms left} | {FUTURE, holder, ms left}: held, with more left
--     than a lease lasts, because the server's clock was set back; it now ends as if it was taken this moment | {NOJOB}
--     | {ANOTHER} | {RESTARTED} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'string', 'string', 'hash', 'stream' })
if bad then return bad end
local at = redis.call('HMGET', KEYS[1], 'id', 'history', 'run_id')
local refused = another_job(at[1]) or restarted(at[3])
if refused then return refused end
local holder, term = redis.call('GET', KEYS[2]), redis.call('GET', KEYS[3])
if holder and holder ~= ARGV[2] then
  local left = redis.call('PTTL', KEYS[2])
  if left <= tonumber(ARGV[3]) then return { 'HELD', holder, left } end
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
  return { 'FUTURE', holder, left }
end
local number = term and tonumber(term:match('^%w+%-(%d+)%-')) or 0
if not term or term:match('(%w+)$') ~= ARGV[4] then
  term = at[2] .. '-' .. count(number + 1) .. '-' .. ARGV[4]
end
-- A plan must not flip to what the last holder staged, since the new holder stages its own. The deletion comes first:
-- it is allowed when memory is full, and lets the script write. Taking over must be possible then.
redis.call('HDEL', KEYS[4], ARGV[5])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
redis.call('SET', KEYS[3], term)
redis.call('XADD', KEYS[5], 'MAXLEN', '~', 1000, '*', 'kind', 'take', 'shard', ARGV[5], 'holder', ARGV[2], 'term', term)
return { 'OK', term }
