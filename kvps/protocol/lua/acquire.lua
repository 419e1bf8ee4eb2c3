-- acquire: take a shard's lease under a new term, unless another aggregator holds it. The lease is for liveness and may
-- expire at any time. The term makes commits safe: it is compared for equality and never expires.
-- KEYS version:hash lease(shard):string term(shard):string ready:hash leases:stream never
-- ARGV job holder lease_ms nonce shard
--   nonce: of this call; a repeat gets the same term
-- USES job numbers terms time
-- Returns {OK, term} also when repeated | {HELD, holder, ms left} | {FUTURE, holder, ms left}: held, with more left
--     than a lease lasts, because the server's clock was set back; it now ends as if it was taken this moment | {NOJOB}
--     | {ANOTHER} | {RESTARTED} | {WRONGTYPE, key, is, want}
local refused, history = read_job(job, 'history')
if refused then return refused end
local present, term = redis.call('GET', keys.lease), redis.call('GET', keys.term)
if present and present ~= holder then
  local left = redis.call('PTTL', keys.lease)
  if left <= tonumber(lease_ms) then return { 'HELD', present, left } end
  redis.call('PEXPIRE', keys.lease, lease_ms)
  return { 'FUTURE', present, left }
end
if not term or term:match('%-(%w+)$') ~= nonce then term = next_term(history, term, nonce) end
-- A plan must not flip to what the last holder staged, since the new holder stages its own. The deletion comes first:
-- it is allowed when memory is full, and lets the script write. Taking over must be possible then.
redis.call('HDEL', keys.ready, shard)
redis.call('SET', keys.lease, holder, 'PX', lease_ms)
redis.call('SET', keys.term, term)
redis.call('XADD', keys.leases, 'MAXLEN', '~', 1000, '*', 'kind', 'take', 'at_ms', digits(now_ms()),
  'shard', shard, 'holder', holder, 'term', term)
return { 'OK', term }
