-- publish: open the plan of the next version of a job whose learner makes the versions. The plan has no contributions,
-- but may name the items of experience that the version is trained on; `ready` flips to it as to any other. An open plan
-- of another call is replaced, and so is what was staged for it: that call has failed, or its publisher lost shard 0 to
-- this one.
-- KEYS version:hash config:hash plan:hash ready:hash term(shard):string rollouts:hash items:hash lots:hash
-- KEYS taken_lots:zset never
-- ARGV job term version head history by loss nonce trained...
--   version, head: the version that the plan makes, and the head before it
--   by: who publishes, one word
--   loss: of the weights, or ''
--   nonce: of this call
--   trained: the lots that the version is trained on, which the term has taken
-- USES job numbers plans rollouts run_control
-- Returns {OPEN, version, plan JSON} also when repeated | {MADE, version}: the job has that version
--     | {TAKEN, lot}: the term has not taken it, or it is named twice | {STALE, lot}: an item of it is too old for this
--     version | {NONE}: the job takes no experience | {STOPPED, run, by, reason, at} | {TERM, term} | {HEAD, head}
--     | {HISTORY, history} | {TRAINED}: a job of workers
--     | {BY}: that is no word | {NOJOB} | {ANOTHER} | {RESTARTED} | {WRONGTYPE, key, is, want}
local refused, committed, present_head, present_history, run =
  read_job(job, 'version', 'head', 'history', 'run')
if refused then return refused end
if redis.call('HGET', keys.config, 'publishes') ~= '1' then return { 'TRAINED' } end
if present_history ~= history then return { 'HISTORY', present_history } end
local present_term = redis.call('GET', keys.term) or ''
if present_term ~= term then return { 'TERM', present_term } end
if #by > 300 or not by:find('^[%w%.:_-]+$') then return { 'BY' } end -- it goes into JSON as it is
local next_version, present = whole(version), whole(committed)
if next_version and present >= next_version then return { 'MADE', present } end
if next_version ~= present + 1 or present_head ~= head then return { 'HEAD', present_head } end
if run then return run_answer('STOPPED') end
local opened_by, of_term, text = unpack(redis.call('HMGET', keys.plan, 'nonce', 'term', 'text'))
if opened_by == nonce and (#trained == 0 or of_term == term) then return { 'OPEN', present, text } end
local items, named, s = {}, {}, #trained > 0 and read_rollouts()
if s == nil then return { 'NONE' } end
if s and redis.call('HGET', keys.rollouts, 'claimed') ~= term then return { 'TAKEN', '' } end
for _, lot in ipairs(trained) do
  local found = not named[lot] and redis.call('ZSCORE', keys.taken_lots, lot) and read_lot(lot)
  if not found or #found.ids == 0 then return { 'TAKEN', lot } end
  named[lot] = true
  if s.staleness >= 0 and present - found.base > s.staleness then return { 'STALE', lot } end
  for _, item in ipairs(texts_of(lot, found, s.units)) do items[#items + 1] = item end
end

redis.call('DEL', keys.plan, keys.ready) -- allowed when memory is full, and lets the script write
local id = redis.call('HINCRBY', keys.version, 'plan_id', 1)
text = encode_plan({ id = id, version = next_version, head = head, history = history, divisor = 1, progress = 0,
  by = by, loss = tonumber(loss), trained = items, contributions = {}, rejected = {} })
redis.call('HSET', keys.plan, 'id', digits(id), 'version', version, 'head', head, 'history', history,
  'through', '0-0', 'nonce', nonce, 'term', term, 'lots', table.concat(trained, ' '), 'text', text)
return { 'OPEN', present, text }
