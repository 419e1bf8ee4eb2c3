-- renew: keep a shard's lease, or end it. An expired lease is taken again as long as the term is still the caller's.
-- KEYS version:hash lease(shard):string term(shard):string leases:stream never
-- ARGV job holder term lease_ms
--   lease_ms: 0 gives the lease up; the stream of leases then wakes standbys
-- USES job numbers time
-- Returns {OK} | {LOST, holder or ''} | {NOJOB} | {ANOTHER} | {RESTARTED} | {WRONGTYPE, key, is, want}
local refused = read_job(job)
if refused then return refused end
local present = redis.call('GET', keys.lease)
if redis.call('GET', keys.term) ~= term or (present and present ~= holder) then return { 'LOST', present or '' } end
redis.call('DEL', keys.lease) -- allowed when memory is full, and lets the script write
if lease_ms == '0' then
  redis.call('XADD', keys.leases, 'MAXLEN', '~', 1000, '*', 'kind', 'release', 'at_ms', digits(now_ms()),
    'holder', holder, 'term', term)
else
  redis.call('SET', keys.lease, holder, 'PX', lease_ms)
end
return { 'OK' }
