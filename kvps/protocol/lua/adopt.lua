-- adopt: give a job whose launcher has ended another launcher. Workers that ended with it or before it, and are started
-- again, keep their places: the others wait for each of them until it has joined again, as in a job that was restored.
-- KEYS version:hash config:hash workers:hash clock:hash skip:hash commits:stream units:hash free_units:zset taken_units:zset
-- KEYS rounds:zset pushed:zset draining:zset turns:stream never
-- ARGV job before launched_by by ended...
--   before: the launcher that the caller found in config
--   launched_by: the new one
--   by: the new one in words, for the log
--   ended: worker, incarnation, ... of processes that are known to have ended, and have work left
-- USES job log turns units workers
-- Returns {OK} also when repeated | {OTHER}: it has another launcher by now | {NOJOB} | {ANOTHER} | {RESTARTED}
--     | {WRONGTYPE, key, is, want}
local refused = read_job(job)
if refused then return refused end
local present = redis.call('HGET', keys.config, 'launched_by')
if present == launched_by then return { 'OK' } end
if present ~= before then return { 'OTHER' } end
redis.call('HSET', keys.config, 'launched_by', launched_by)
local freed = false
for i = 1, #ended, 2 do
  local worker = ended[i]
  local entry = read_worker(worker)
  if entry and entry.incarnation == ended[i + 1] and not entry.finished then
    freed = drop_unit(worker, entry) or freed
    entry.state, entry.awaited = 'rejoining', true
    write_worker(worker, entry)
    local function count(hash) return tonumber(redis.call('HGET', hash, worker) or '0') end
    redis.call('ZADD', keys.rounds, count(keys.clock) + count(keys.skip), worker)
    redis.call('ZADD', keys.pushed, entry.round, worker)
    redis.call('ZREM', keys.draining, worker)
  end
end
log_entry('adopt', 'by', by)
if freed then wake(lowest_round()) end
return { 'OK' }
