-- create: make a job whose first version is already staged: version 0, or the version of a checkpoint.
-- KEYS version:hash config:hash made_with:hash layout:string commits:stream removed:string clock:hash skip:hash workers:hash
-- KEYS units:hash states:hash free_units:zset taken_units:zset rounds:zset pushed:zset draining:zset finished:set
-- KEYS ranks:hash rollouts:hash items:hash lots:hash waiting_lots:zset lot_bases:zset bases:hash never
-- ARGV job layout run_id name shards checkpoint settings...
--   job: a nonce; it is also the first history
--   layout: JSON
--   name: the staged name of the first version
--   checkpoint: '' or JSON, every value as text: version, head, contributions, job, id, lr, run, all_come, suspended,
--     clock, skip, workers, units, states, settings (of these, those that differ), counters, items, lots
--   settings: field, value, ... of config
-- USES earlier index log numbers rollouts staleness
-- Returns {OK} also when repeated | {EXISTS} | {REMOVED}: an earlier job is being removed | {WRONGTYPE, key, is, want}
local id = redis.call('HGET', keys.version, 'id')
if id == job then return { 'OK' } end
if id or redis.call('EXISTS', keys.version, keys.config, keys.layout) > 0 then return { 'EXISTS' } end
if redis.call('EXISTS', keys.removed) > 0 then return { 'REMOVED' } end
local earlier = checkpoint ~= '' and cjson.decode(checkpoint)

redis.call('DEL', keys.made_with, keys.commits, keys.clock, keys.skip, keys.workers, keys.units, keys.states,
  keys.rollouts, keys.items, keys.lots, keys.waiting_lots, keys.lot_bases, keys.bases)
redis.call('HSET', keys.config, unpack(settings))
-- No script of workers declares this copy, so that they may not write it.
redis.call('HSET', keys.made_with, unpack(settings))
redis.call('HDEL', keys.made_with, 'launched_by', 'memory')
redis.call('SET', keys.layout, layout)
-- The chain starts from the id, so that two jobs of one name never share a head; or it continues a checkpoint's.
local version, head = earlier and earlier.version or '0', earlier and earlier.head or redis.sha1hex(job)
redis.call('HSET', keys.version, 'version', version, 'head', head, 'history', job, 'id', job, 'plan_id', 0, 'run_id', run_id)
for shard = 0, math.min(whole(shards), MOST_SHARDS) - 1 do
  redis.call('HSET', keys.version, 'shard:' .. digits(shard), name, 'before:' .. digits(shard), name)
end
if read_rollouts() then redis.call('HSET', keys.bases, version, name) end -- actors may be there before the learner
if earlier then
  redis.call('HSET', keys.version, 'from_version', version, 'from_head', head, 'from_contributions', earlier.contributions)
  if earlier.lr ~= '' then redis.call('HSET', keys.version, 'lr', earlier.lr) end
  -- The job waits for each worker that was at work, and evicts none of them for silence: only with all of them does it
  -- continue as it was, and in BSP reach the same bits. Where each has data of its own, it also waits for those that
  -- left with work undone, as after an error; and for evicted ones, if `all_come`: a command launched the earlier job and
  -- launches this one, and starts all of them again. All have left a job that was suspended. In rounds of units it reaches
  -- the same bits with any workers, and waits for none.
  local closes, _, _, units = read_rule('units')
  local back = { left = units == '0' or earlier.suspended == '1' }
  back.evicted = units == '0' and earlier.all_come == '1'
  local function comes(_, entry)
    if closes == 'units' then entry.state = 'left' else entry.awaited = true end
  end
  restore_hashes(earlier, back, comes)
  restore_items(earlier)
  log_entry('restore', 'version', version, 'head', head, 'history', job,
    'contributions', earlier.contributions, 'job', earlier.job, 'id', earlier.id, 'lr', earlier.lr,
    'settings', earlier.settings)
  local run = earlier.run
  if run.run then -- a stop is one of this job too, which ends with the same round
    for field, value in pairs(run) do redis.call('HSET', keys.version, field, value) end
    log_entry('stop', 'by', run.run_by, 'reason', run.run_reason, 'round', run.run:match('%d+'))
  end
else
  log_entry('create', 'version', 0, 'head', head, 'history', job)
end
index_members()
return { 'OK' }
