-- join: begin a new incarnation of a worker id, and admit it at a round after the open plan.
-- KEYS version:hash config:hash workers:hash clock:hash skip:hash heartbeat:zset plan:hash commits:stream units:hash
-- KEYS free_units:zset taken_units:zset rounds:zset pushed:zset draining:zset finished:set ranks:hash turns:stream
-- KEYS states:hash never
-- ARGV job worker nonce replaces process
--   nonce: of this call
--   replaces: the incarnation judged dead, '*' to take over, '' for neither
--   process: JSON: host, pid, ... of the process
-- USES job log numbers staleness states time turns units workers
-- Returns {OK, rank, incarnation, round, clock, pending, name of the stored residual that it inherits or '', its newest
--     accepted state or ''} also when repeated | {ALIVE, JSON entry}: the id belongs to a living worker
--     | {COMPLETE, worker...}: these divide the data among themselves, all of them | {PUBLISHED}: a learner makes the
--     versions | {NOJOB} | {ANOTHER} | {RESTARTED} | {WRONGTYPE, key, is, want}
local refused, version, furthest, free_rank = read_job(job, 'version', 'furthest', 'free_rank')
if refused then return refused end
local closes, bound, _, timeout_ms, workers, fixed, task, units, publishes =
  read_rule('worker_timeout_ms', 'workers', 'fixed_workers', 'task', 'units', 'publishes')
if publishes == '1' then return { 'PUBLISHED' } end
-- A job of an earlier version has no fixed_workers: there it was the workers of a task without units.
if not fixed then fixed = task ~= '' and units == '0' and '1' or '' end
local now, wanted = now_ms(), whole(workers)
local entry = read_worker(worker)
local clock = tonumber(redis.call('HGET', keys.clock, worker) or '0')
local committed = clock + tonumber(redis.call('HGET', keys.skip, worker) or '0')
local pending = entry and entry.round - committed or 0
local function answer()
  return { 'OK', entry.rank, entry.incarnation, entry.round, clock, pending, entry.residual or '',
    newest_state(worker, entry.round, pending) }
end

if entry and entry.nonce == nonce then return answer() end
if entry and entry.state == 'active' and replaces ~= '*' and replaces ~= entry.incarnation then
  local seen = tonumber(redis.call('ZSCORE', keys.heartbeat, worker) or '0')
  if seen > now then redis.call('ZADD', keys.heartbeat, now, worker) end -- the server's clock was set back
  if now - seen <= whole(timeout_ms) then return { 'ALIVE', cjson.encode(entry) } end
end
local joined = redis.call('HLEN', keys.workers)
if not entry then check_ids(MOST_IDS - 1) end
if not entry and fixed == '1' and joined >= wanted then
  local reply = redis.call('HKEYS', keys.workers)
  table.insert(reply, 1, 'COMPLETE')
  return reply
end

-- A worker with waiting contributions continues at its old round: skipping ahead would count them as committed.
local round = pending > 0 and entry.round or math.max(committed, due_round(closes, bound, worker, version, furthest))

local freed = entry and drop_unit(worker, entry)
if entry then take_state(worker, entry.round + 1) end -- of what was rejected: it waits for the last incarnation's next
local fresh = cjson.decode(process)
-- w3 gets rank 3 if that is free and below `workers`, other ids the lowest free rank: so ids and ranks mostly agree.
local rank = entry and entry.rank or tonumber(worker:match('^w(%d%d?%d?)$'))
if not entry and (not rank or rank >= wanted or redis.call('HEXISTS', keys.ranks, digits(rank)) == 1) then
  rank = lowest_free(keys.ranks, '', free_rank, LARGEST_RANK)
  if not rank then error('ranks of the job: no rank is free') end
  redis.call('HSET', keys.version, 'free_rank', digits(rank))
end
fresh.rank, fresh.incarnations = rank, (entry and entry.incarnations or 0) + 1
fresh.nonce, fresh.incarnation = nonce, digits(fresh.incarnations) .. '-' .. nonce
fresh.state, fresh.accepted, fresh.round = 'active', 0, round
fresh.finished, fresh.residual = false, entry and entry.residual or nil
entry = fresh
write_worker(worker, entry)
redis.call('HSET', keys.ranks, digits(rank), worker)
redis.call('HSETNX', keys.clock, worker, 0)
redis.call('HSET', keys.skip, worker, digits(round - pending - clock))
redis.call('ZADD', keys.heartbeat, now, worker)
redis.call('ZADD', keys.rounds, round - pending, worker)
redis.call('ZADD', keys.pushed, round, worker)
redis.call('ZREM', keys.draining, worker)
redis.call('SREM', keys.finished, worker)
log_entry('join', 'worker', worker, 'incarnation', entry.incarnation,
  'rank', digits(rank), 'round', digits(round), 'clock', digits(clock), 'residual', entry.residual or '')
-- Workers wait before their second round until all have joined, and a worker without a unit waits for a freed one.
if freed or (joined < wanted and redis.call('HLEN', keys.workers) == wanted) then wake(lowest_round()) end
return answer()
