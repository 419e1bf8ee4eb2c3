-- recover: begin a new history on a server that was restarted and may have lost its last writes. What it has is a whole
-- earlier state, but a process that remembers a newer state must not act on that memory. So all terms and incarnations
-- end: holders load the committed version, workers join again and repeat what was lost. The others wait for each worker
-- until it has joined again or has been silent for too long.
-- KEYS version:hash workers:hash heartbeat:zset plan:hash ready:hash commits:stream units:hash free_units:zset pin:string
-- KEYS taken_units:zset turns:stream rounds:zset rollouts:hash actors:hash actor_beats:zset lease(*):string
-- KEYS term(*):string never
-- ARGV job run_id history remembered
--   run_id: the server's now
--   history: the new one
--   remembered: the newest version that the caller knows of
-- USES job log numbers plans replies rollouts terms time turns units workers
-- Returns {OK, version, history} also when repeated | {NOJOB} | {ANOTHER} | {WRONGTYPE, key, is, want}
local id, version, head, before, old_run_id = unpack(redis.call('HMGET', keys.version,
  'id', 'version', 'head', 'history', 'run_id'))
local another = another_job(id, job)
if another then return another end
if old_run_id == run_id then return { 'OK', whole(version), before } end
check_ids(4 * MOST_IDS) -- no job that only `join` has filled
local text = redis.call('HGET', keys.plan, 'text')
redis.call('DEL', keys.ready, keys.pin) -- first, since it is allowed when memory is full
-- The open plan continues in the new history: the rounds of contributions rejected from it end with its commit.
if text then
  local plan = cjson.decode(text)
  plan.history = history
  redis.call('HSET', keys.plan, 'history', history, 'text', encode_plan(plan))
end
for worker, entry_text in each_pair(redis.call('HGETALL', keys.workers)) do
  local entry = cjson.decode(entry_text)
  if entry.state == 'active' then
    drop_unit(worker, entry)
    entry.state = 'rejoining'
    write_worker(worker, entry)
    redis.call('ZADD', keys.heartbeat, now_ms(), worker)
  end
end
if redis.call('HLEN', keys.actors) > 4 * MOST_IDS then redis.call('UNLINK', keys.actors) end -- no job has so many
for _, actor in ipairs(redis.call('HKEYS', keys.actors)) do end_actor(actor, read_entry_of(actor) or {}) end
for i, key in ipairs(keys.term) do
  local term = redis.call('GET', key)
  redis.call('DEL', keys.lease[i])
  redis.call('SET', key, next_term(history, term, 'recover'))
end
redis.call('HSET', keys.version, 'history', history, 'run_id', run_id)
local lost = math.max(0, (whole(remembered) or 0) - whole(version))
log_entry('recover', 'version', version, 'head', head, 'history', history,
  'before', before, 'lost', digits(lost))
wake(lowest_round())
return { 'OK', whole(version), history }
