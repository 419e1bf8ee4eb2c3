-- report: note the figures of an evaluation of a version: among all evaluations, and as the newest ones. They are not in
-- the commit log: who only evaluates need not be able to write there.
-- KEYS evaluation:hash evaluations:stream never
-- ARGV job version figures by nonce version_key
--   version: whose weights were evaluated
--   figures: JSON, name to number
--   by: who evaluated them
--   nonce: of this report, so that a repeat is known. Another report between a call and its repeat hides that
--   version_key: the version hash. It is no declared key: an evaluator may only read it, and Redis would ask for the
--     right to write it. It is in the same slot
-- USES job numbers time
-- Returns {OK, ms since 1970} also when repeated | {AHEAD, version}: there is no such version yet | {RESTARTED}
--     | {NOJOB} | {ANOTHER} | {WRONGTYPE, key, is, want}
local id, run_id, present = unpack(redis.call('HMGET', version_key, 'id', 'run_id', 'version'))
local refused = another_job(id, job) or restarted(run_id)
if refused then return refused end
if whole(version) > whole(present) then return { 'AHEAD', present } end
local known, at_ms = unpack(redis.call('HMGET', keys.evaluation, 'nonce', 'at_ms'))
if known == nonce then return { 'OK', at_ms } end
local now = now_ms()
redis.call('DEL', keys.evaluation) -- allowed when memory is full, and lets the script write
redis.call('HSET', keys.evaluation, 'version', version, 'figures', figures, 'by', by, 'nonce', nonce,
  'at_ms', digits(now))
redis.call('XADD', keys.evaluations, 'MAXLEN', '~', 10000, '*', 'at_ms', digits(now), 'version', version,
  'figures', figures, 'by', by)
return { 'OK', digits(now) }
