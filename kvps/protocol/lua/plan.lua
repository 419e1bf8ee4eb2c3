-- plan: open the next plan if the mode's condition holds. It takes no decision from its caller, so anyone may repeat it.
-- It looks only at workers whose contributions it takes: the rest is in sets and counts that other scripts keep.
-- KEYS version:hash config:hash workers:hash inbox:stream plan:hash rounds:zset pushed:zset pin:string? draining:zset?
-- KEYS finished:set? never
-- READS version config workers inbox plan rounds pushed pin draining finished
-- ARGV job known_id known_history
--   known_id, known_history: of the plan that the caller knows, or '' and ''
-- USES arrivals job numbers pins plans replies run_control staleness time unit_rounds
-- Returns {OPEN, version, pin, members, plan JSON} | {SAME, version, pin, members}: the caller's plan is open
--     | {IDLE, version, pin, members}: also while the job is paused | {GRACE, version, pin, members, ms}: the quorum is
--     there, and the others have so much time left | {EARLY, version, pin, members}: fewer than `workers` have
--     ever joined, or fewer than `min_workers` are left; members is the number of workers that are not gone
--     | {NOJOB} | {ANOTHER} | {RESTARTED} | {WRONGTYPE, key, is, want}
local refused, committed, head, history, progress, graced, run, lr =
  read_job(job, 'version', 'head', 'history', 'contributions', 'graced', 'run', 'lr')
if refused then return refused end
local version, pin = whole(committed), pinned()
local members = redis.call('ZCARD', keys.rounds)
local function answer(code) return { code, version, pin, members } end
local open_id, open_history = unpack(redis.call('HMGET', keys.plan, 'id', 'history'))
if open_id and open_id == known_id and open_history == known_history then return answer('SAME') end
if open_id then return { 'OPEN', version, pin, members, redis.call('HGET', keys.plan, 'text') } end
if run == 'pause' then return answer('IDLE') end
local closes, _, rounds, workers, min_workers, quorum, grace_ms =
  read_rule('workers', 'min_workers', 'quorum', 'grace_ms')
-- A stopped job waits for nobody who is not there. A suspended one goes on later, with all of its workers.
local ends = last_round(run)
local stopped = ends and run:find('^stop')
if not stopped and redis.call('HLEN', keys.workers) < whole(workers) then return answer('EARLY') end
-- In BSP without a quorum the round is due when every worker in the vector clock has pushed it; one of units, when all
-- its units are there.
local _, slowest = unpack(redis.call('ZRANGE', keys.pushed, 0, 0, 'WITHSCORES'))
if closes == 'all' and slowest and tonumber(slowest) <= version then return answer('IDLE') end
-- Workers that have done all their rounds still count in the divisor, or a run's last contributions would weigh more.
local divisor = redis.call('ZCARD', keys.pushed) + redis.call('SCARD', keys.finished)
if divisor < tonumber(min_workers or '0') and not ends then
  return answer(redis.call('XLEN', keys.inbox) > 0 and 'EARLY' or 'IDLE')
end

-- Opens the plan. The contributions are chosen: the inbox's entries up to `through`, or those of `ids` alone.
local function open(contributions, through, ids)
  redis.call('DEL', keys.plan) -- allowed when memory is full, and lets the script write: only commits free memory
  local id = redis.call('HINCRBY', keys.version, 'plan_id', 1)
  local text = encode_plan({ id = id, version = version + 1, head = head, history = history, divisor = divisor,
    progress = tonumber(progress), lr = tonumber(lr or ''), contributions = contributions, rejected = {} })
  redis.call('HSET', keys.plan, 'id', digits(id), 'version', digits(version + 1), 'head', head, 'history', history,
    'through', through, 'text', text)
  if ids then redis.call('HSET', keys.plan, 'ids', ids) end
  return { 'OPEN', version, pin, members, text }
end

if rounds then
  local chosen, ids = whole_round(rounds, version)
  divisor = #chosen
  return #chosen > 0 and open(chosen, ids[#ids], table.concat(ids, ' ')) or answer('IDLE')
end

-- A quorum waits for no worker that is gone, and gives the others their time from when it is there.
if closes == 'quorum' then
  local waiting, active, grace = redis.call('XLEN', keys.inbox), redis.call('ZCARD', keys.pushed), whole(grace_ms)
  local wanted = math.max(1, math.min(whole(quorum), active))
  if waiting < wanted then return answer('IDLE') end
  if grace > 0 and waiting - redis.call('ZCARD', keys.draining) < active then
    local id, last = read_entry(redis.call('XRANGE', keys.inbox, '-', '+', 'COUNT', wanted)[wanted])
    local now = now_ms()
    local since = now - arrival(id, last.arrived, now, graced)
    if since < grace then return { 'GRACE', version, pin, members, grace - since } end
  end
end

-- BSP takes the one round that is due. SSP and ASP take what waits, oldest first, up to a limit that keeps the commit
-- from blocking the server for long. With a quorum a version takes all that waits: if late ones are dropped, nothing
-- may be left for the next version. 4,096 workers have no more than 65,536 waiting, unless a worker writes there itself.
local texts, order, through = {}, {}, nil
local most = closes == 'any' and 512 or closes == 'all' and math.max(1, members) or 65536
for i, entry in ipairs(redis.call('XRANGE', keys.inbox, '-', '+', 'COUNT', most)) do
  local id, fields = read_entry(entry)
  if closes == 'all' and tonumber(fields.round) ~= version + 1 then break end
  texts[i], order[i], through = fields.contribution, tonumber(fields.rank) * 1048576 + i, id
end
if not through then return answer('IDLE') end
table.sort(order)
local chosen, seen, draining = {}, {}, redis.call('ZCARD', keys.draining) > 0
for i, key in ipairs(order) do
  chosen[i] = texts[key % 1048576]
  local worker = draining and author_and_unit(chosen[i])
  if worker and not seen[worker] and redis.call('ZSCORE', keys.draining, worker)
    and redis.call('SISMEMBER', keys.finished, worker) == 0 then divisor = divisor + 1 end
  if worker then seen[worker] = true end
end
if closes == 'quorum' then divisor = #chosen end
return open(chosen, through)
