-- reject: take a damaged contribution out of the open plan, and log the reason. The plan keeps its version; if no
-- contribution is left, that version has no step. The rejected round ends when the version is committed, not before:
-- the same plan may hold earlier rounds of that worker, for which the others still wait.
-- KEYS[1] version hash, [2] inbox stream, [3] plan hash, [4] ready hash, [5] commits stream, [6] the term string
--     of the shard
-- ARGV[1] job id   [2] term   [3] plan id   [4] the contribution's text in the plan   [5] reason
-- Returns {OK} | {TERM, term} | {PLAN} also when repeated | {NOJOB} | {ANOTHER} | {RESTARTED}
--     | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'stream', 'hash', 'hash', 'stream', 'string' })
if bad then return bad end
local at = redis.call('HMGET', KEYS[1], 'id', 'run_id')
local refused = another_job(at[1]) or restarted(at[2])
if refused then return refused end
local holds = redis.call('GET', KEYS[6]) or ''
if holds ~= ARGV[2] then return { 'TERM', holds } end
local open = redis.call('HMGET', KEYS[3], 'id', 'through', 'text')
if not open[1] or open[1] ~= ARGV[3] then return { 'PLAN' } end
local plan, at = cjson.decode(open[3]), nil
for i, contribution in ipairs(plan.contributions) do
  if contribution == ARGV[4] then at = i end
end
if not at then return { 'PLAN' } end

redis.call('DEL', KEYS[4]) -- allowed when memory is full, and lets the script write
table.insert(plan.rejected, table.remove(plan.contributions, at))
plan.id = redis.call('HINCRBY', KEYS[1], 'plan_id', 1)
redis.call('HSET', KEYS[3], 'id', count(plan.id), 'text', plan_encode(plan))
for _, item in ipairs(redis.call('XRANGE', KEYS[2], '-', open[2])) do
  if item[2][6] == ARGV[4] then redis.call('XDEL', KEYS[2], item[1]) end
end
local worker, incarnation, seq, round, digest = ARGV[4]:match('^(%S+) (%S+) (%S+) (%S+) %S+ %S+ %S+ (%S+)')
redis.call('XADD', KEYS[5], '*', 'kind', 'reject', 'worker', worker, 'incarnation', incarnation,
  'seq', seq, 'round', round, 'reason', ARGV[5], 'digest', digest)
return { 'OK' }
