-- plan: open the next plan if the mode's condition holds. Takes no decision from its caller, so anyone may repeat it.
-- It looks only at workers whose contributions it takes: the rest is in sets and counts that other scripts keep.
-- KEYS[1] version hash, [2] config hash, [3] workers hash, [4] inbox stream, [5] plan hash, [6] pin string,
--     [7] rounds zset, [8] pushed zset, [9] draining zset, [10] finished set
-- ARGV[1] job id   [2] the id of the plan that the caller knows, or ''   [3] the history of that plan
-- Returns {OPEN, version, pin, members, plan JSON} | {SAME, version, pin, members}: the caller's plan is open
--     | {IDLE, version, pin, members} | {GRACE, version, pin, members, ms}: the quorum is there, and the others have so
--     much time left | {EARLY, version, pin, members}: fewer than `workers` have ever joined, or fewer
--     than `min_workers` are left; members is the number of workers that are not gone | {NOJOB} | {ANOTHER}
--     | {RESTARTED} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'hash', 'hash', 'stream', 'hash', 'string', 'zset', 'zset', 'zset', 'set' })
if bad then return bad end
local at = redis.call('HMGET', KEYS[1], 'id', 'version', 'head', 'history', 'contributions', 'run_id')
local refused = another_job(at[1]) or restarted(at[6])
if refused then return refused end
local version, pin, present = whole(at[2]), redis.call('GET', KEYS[6]) or '', redis.call('ZCARD', KEYS[7])
local function answer(code) return { code, version, pin, present } end
local open = redis.call('HMGET', KEYS[5], 'id', 'history', 'text')
if open[1] and open[1] == ARGV[2] and open[2] == ARGV[3] then return answer('SAME') end
if open[1] then return { 'OPEN', version, pin, present, open[3] } end
local config = redis.call('HMGET', KEYS[2], 'staleness', 'workers', 'min_workers', 'quorum', 'grace_ms')
if redis.call('HLEN', KEYS[3]) < whole(config[2]) then return answer('EARLY') end
-- In BSP without a quorum the round is due when every worker in the vector clock has pushed it.
local quorum = whole(config[4])
local bsp = config[1] == '0' and quorum == 0
local slowest = redis.call('ZRANGE', KEYS[8], 0, 0, 'WITHSCORES')[2]
if bsp and slowest and tonumber(slowest) <= version then return answer('IDLE') end
-- Workers that have done all their rounds still count in the divisor, or a run's last contributions would weigh more.
local divisor = redis.call('ZCARD', KEYS[8]) + redis.call('SCARD', KEYS[10])
if divisor < tonumber(config[3] or '0') then return answer(redis.call('XLEN', KEYS[4]) > 0 and 'EARLY' or 'IDLE') end

-- A quorum waits for no worker that is gone, and gives the others their time from when it is there. The ids of the inbox
-- are times; if the server's clock was set back since, the time is over.
if quorum > 0 then
  local waiting, active, grace = redis.call('XLEN', KEYS[4]), redis.call('ZCARD', KEYS[8]), whole(config[5])
  local wanted = math.max(1, math.min(quorum, active))
  if waiting < wanted then return answer('IDLE') end
  if grace > 0 and waiting - redis.call('ZCARD', KEYS[9]) < active then
    local last = redis.call('XRANGE', KEYS[4], '-', '+', 'COUNT', wanted)[wanted][1]
    local since = now_ms() - tonumber(last:match('^%d+'))
    if since >= 0 and since < grace then return { 'GRACE', version, pin, present, grace - since } end
  end
end

-- BSP takes the one round that is due. SSP and ASP take what waits, oldest first, up to a limit that keeps the commit
-- from blocking the server for long. With a quorum a version takes all that waits: if late ones are dropped, nothing
-- may be left for the next version.
local texts, order, through = {}, {}, nil
for i, item in ipairs(redis.call('XRANGE', KEYS[4], '-', '+', 'COUNT', (bsp or quorum > 0) and 1048575 or 512)) do
  local rank, round, text = item[2][2], item[2][4], item[2][6]
  if bsp and tonumber(round) ~= version + 1 then break end
  texts[i], order[i], through = text, tonumber(rank) * 1048576 + i, item[1]
end
if not through then return answer('IDLE') end
table.sort(order)
local chosen, seen, draining = {}, {}, redis.call('ZCARD', KEYS[9]) > 0
for i, key in ipairs(order) do
  chosen[i] = texts[key % 1048576]
  local worker = draining and author_and_unit(chosen[i])
  if worker and not seen[worker] and redis.call('ZSCORE', KEYS[9], worker)
    and redis.call('SISMEMBER', KEYS[10], worker) == 0 then divisor = divisor + 1 end
  if worker then seen[worker] = true end
end
if quorum > 0 then divisor = #chosen end
redis.call('DEL', KEYS[5]) -- allowed when memory is full, and lets the script write: only commits free memory
local id = redis.call('HINCRBY', KEYS[1], 'plan_id', 1)
local text = plan_encode({ id = id, version = version + 1, head = at[3], history = at[4], divisor = divisor,
  progress = tonumber(at[5]), contributions = chosen, rejected = {} })
redis.call('HSET', KEYS[5], 'id', count(id), 'version', count(version + 1), 'head', at[3], 'history', at[4],
  'through', through, 'text', text)
return { 'OPEN', version, pin, present, text }
