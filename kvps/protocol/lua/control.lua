-- control: stop, suspend or pause a job, have it go on, or set its learning rate. What is so already is not done
-- again. A job that is stopped or suspended ends with one round, which is fixed here: nothing that was accepted is of a
-- later one.
-- KEYS version:hash config:hash inbox:stream plan:hash pushed:zset draining:zset rounds:zset units:hash commits:stream
-- KEYS turns:stream never
-- ARGV job what by reason lr
--   what: stop, suspend, pause, resume or set
--   by: the worker that asks for it, or ''
--   lr: to set, from the next plan on; '' for the optimizer's own
-- USES job log numbers run_control staleness time turns unit_rounds
-- Returns {OK, run, by, reason, ms}: what the job does now, and who has asked for that, why and when; false for each if
--     nobody has; also when repeated | {NOJOB} | {ANOTHER} | {RESTARTED} | {WRONGTYPE, key, is, want}
local refused, version, run, furthest, present_lr = read_job(job, 'version', 'run', 'furthest', 'lr')
if refused then return refused end
if what == 'set' then
  if lr ~= (present_lr or '') then
    redis.call('HDEL', keys.version, 'lr') -- allowed when memory is full, and lets the script write
    if lr ~= '' then redis.call('HSET', keys.version, 'lr', lr) end
    log_entry('set', 'by', by, 'reason', reason, 'lr', lr)
  end
  return run_answer('OK')
end
run = run or ''
local last, state = last_round(run), run:match('^%l*')
-- A stop ends what is suspended or paused, too. A job that ends already is not paused.
local done = state == what or (what == 'suspend' and last) or (what == 'pause' and last) or (what == 'resume' and run == '')
if done then return run_answer('OK') end

local function highest(key)
  local _, round = unpack(redis.call('ZRANGE', key, -1, -1, 'WITHSCORES'))
  return tonumber(round or '0')
end

-- In rounds of units it is a number of versions, and all units of theirs that were handed out are in them. In ASP there
-- is no round to wait for.
local function round_to_end_with()
  local closes, bound, rounds = read_rule()
  if bound < 0 then return 0 end
  if rounds then
    local handed_out = tonumber(redis.call('HGET', keys.units, 'next') or '0')
    return math.max(whole(version), handed_out > 0 and round_of(rounds, handed_out - 1) + 1 or 0)
  end
  local round = math.max(tonumber(furthest or '0'), highest(keys.pushed), highest(keys.draining))
  if closes == 'any' then return round end
  if closes == 'all' then return math.max(round, whole(version)) end
  -- With a quorum, what has come too late for the open plan goes into the version behind it.
  local through = redis.call('HGET', keys.plan, 'through')
  local waits = redis.call('XRANGE', keys.inbox, through and '(' .. through or '-', '+', 'COUNT', 1)
  return math.max(round, closed_rounds(version) + #waits)
end

redis.call('HDEL', keys.version, 'run') -- allowed when memory is full, and lets the script write
if what == 'resume' then
  redis.call('HDEL', keys.version, 'run_by', 'run_reason', 'run_at_ms')
  log_entry('resume', 'by', by, 'reason', reason)
else
  if what ~= 'pause' then last = last or round_to_end_with() end
  redis.call('HSET', keys.version, 'run', last and what .. ' ' .. digits(last) or what, 'run_by', by,
    'run_reason', reason, 'run_at_ms', digits(now_ms()))
  log_entry(what, 'by', by, 'reason', reason, unpack(last and { 'round', digits(last) } or {}))
end
wake(lowest_round())
return run_answer('OK')
