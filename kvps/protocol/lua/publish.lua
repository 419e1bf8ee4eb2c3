-- publish: open the plan of the next version of a job whose learner makes the versions. The plan has no contributions;
-- `ready` flips to it as to any other. An open plan of another call is replaced, and so is what was staged for it: that
-- call has failed, or its publisher lost shard 0 to this one.
-- KEYS version:hash config:hash plan:hash ready:hash term(shard):string never
-- ARGV job term version head history by loss nonce
--   version, head: the version that the plan makes, and the head before it
--   by: who publishes, one word
--   loss: of the weights, or ''
--   nonce: of this call
-- USES job numbers plans run_control
-- Returns {OPEN, version, plan JSON} also when repeated | {MADE, version}: the job has that version
--     | {STOPPED, run, by, reason, at} | {TERM, term} | {HEAD, head} | {HISTORY, history} | {TRAINED}: a job of workers
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
local opened_by, text = unpack(redis.call('HMGET', keys.plan, 'nonce', 'text'))
if opened_by == nonce then return { 'OPEN', present, text } end

redis.call('DEL', keys.plan, keys.ready) -- allowed when memory is full, and lets the script write
local id = redis.call('HINCRBY', keys.version, 'plan_id', 1)
text = encode_plan({ id = id, version = next_version, head = head, history = history, divisor = 1, progress = 0,
  by = by, loss = tonumber(loss), contributions = {}, rejected = {} })
redis.call('HSET', keys.plan, 'id', digits(id), 'version', version, 'head', head, 'history', history,
  'through', '0-0', 'nonce', nonce, 'text', text)
return { 'OPEN', present, text }
