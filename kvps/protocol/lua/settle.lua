-- settle: reject lots that a term has taken, for a reason that the log says; or give them back.
-- KEYS version:hash config:hash term(shard):string rollouts:hash items:hash lots:hash waiting_lots:zset lot_bases:zset
-- KEYS taken_lots:zset units:hash plan:hash turns:stream commits:stream news:stream never
-- ARGV job term number reason lots...
--   number: of this call within the term
--   reason: '' to give back
-- USES job rollouts turns
-- Returns {OK, ''} also when repeated | {TAKEN, lot}: the term has not taken it | {PLANNED, lot}: the open plan of this
--     term is trained on it | {PAST} | {NONE} | {TERM, term} | {NOJOB} | {ANOTHER} | {RESTARTED}
--     | {WRONGTYPE, key, is, want}
local refused, version = read_job(job, 'version')
if refused then return refused end
local present_term = redis.call('GET', keys.term) or ''
if present_term ~= term then return { 'TERM', present_term } end
local s = read_rollouts()
if not s then return { 'NONE' } end
local again = earlier_call('settle', term, number)
if again then return again end
local planned_term, planned_lots = unpack(redis.call('HMGET', keys.plan, 'term', 'lots'))
local planned = {}
if planned_term == term then
  for _, lot in ipairs(lots_in(planned_lots)) do planned[lot] = true end
end
for _, lot in ipairs(lots) do
  if not redis.call('ZSCORE', keys.taken_lots, lot) then return { 'TAKEN', lot } end
  if planned[lot] then return { 'PLANNED', lot } end
end
redis.call('HDEL', keys.rollouts, '') -- allowed when memory is full, and lets the script write
local texts = {}
for _, lot in ipairs(lots) do
  if reason == '' then
    give_back(lot)
  elseif redis.call('ZREM', keys.taken_lots, lot) == 1 then
    local found = read_lot(lot) or { ids = {} }
    for _, text in ipairs(texts_of(lot, found, s.units)) do texts[#texts + 1] = text end
    delete_lot(lot, found)
    if s.units > 0 then close_prompt(lot) end
  end
end
if #texts > 0 then
  log_fates('rejected', version, texts, 'reason', reason)
  wake('')
else
  redis.pcall('XADD', keys.news, 'MAXLEN', '~', 100, '*', 'lot', '')
end
note_call('settle', number, '')
return { 'OK', '' }
