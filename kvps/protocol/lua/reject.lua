-- reject: take a contribution out of the open plan, and log the reason. The plan keeps its version; if no contribution is
-- left, that version has no step. The rejected round ends when the version is committed, not before: the same plan may
-- hold earlier rounds of that worker, for which the others still wait.
-- In rounds of units, a unit whose bytes are damaged is computed again: its round is not whole, and the plan is closed.
-- KEYS version:hash config:hash inbox:stream plan:hash ready:hash commits:stream skip:hash units:hash free_units:zset
-- KEYS taken_units:zset rounds:zset draining:zset turns:stream states:hash term(shard):string never
-- ARGV job term plan_id contribution reason damaged
--   contribution: its text in the plan
--   damaged: '1' if its bytes are not those that were accepted, else '0'
-- USES job log numbers plans replies rounds staleness states turns units
-- Returns {OK} | {TERM, term} | {PLAN} also when repeated | {NOJOB} | {ANOTHER} | {RESTARTED}
--     | {WRONGTYPE, key, is, want}
local refused, version = read_job(job, 'version')
if refused then return refused end
local present_term = redis.call('GET', keys.term) or ''
if present_term ~= term then return { 'TERM', present_term } end
local open_id, through, text = unpack(redis.call('HMGET', keys.plan, 'id', 'through', 'text'))
if not open_id or open_id ~= plan_id then return { 'PLAN' } end
local plan, place = cjson.decode(text), nil
for i, each in ipairs(plan.contributions) do
  if each == contribution then place = i end
end
if not place then return { 'PLAN' } end

redis.call('DEL', keys.ready) -- allowed when memory is full, and lets the script write
local author, unit = author_and_unit(contribution)
if damaged == '1' and read_rule() == 'units' then
  redis.call('DEL', keys.plan)
  local _, _, done = end_rounds({ contribution }, keys.skip, 0)
  pass_states_on({ contribution }, done, version)
  withdraw(author, unit)
  wake(lowest_round())
else
  table.insert(plan.rejected, table.remove(plan.contributions, place))
  plan.id = redis.call('HINCRBY', keys.version, 'plan_id', 1)
  redis.call('HSET', keys.plan, 'id', digits(plan.id), 'text', encode_plan(plan))
end
for _, entry in ipairs(redis.call('XRANGE', keys.inbox, '-', through)) do
  local id, fields = read_entry(entry)
  if fields.contribution == contribution then redis.call('XDEL', keys.inbox, id) end
end
local worker, incarnation, seq, round, digest = contribution:match('^(%S+) (%S+) (%S+) (%S+) %S+ %S+ %S+ (%S+)')
log_entry('reject', 'worker', worker, 'incarnation', incarnation,
  'seq', seq, 'round', round, 'reason', reason, 'digest', digest)
return { 'OK' }
