-- recover: begin a new history on a server that was restarted and may have lost its last writes. What it has is a whole
-- earlier state, but a process that remembers a newer state must not act on that memory. So all terms and incarnations
-- end: holders load the committed version, workers join again and repeat what was lost. The others wait for each worker
-- until it has joined again or has been silent for too long.
-- KEYS[1] version hash, [2] workers hash, [3] heartbeat zset, [4] plan hash, [5] ready hash, [6] commits stream,
--     [7] units hash, [8] free units zset, [9] pin string, [10] turns stream, [11] rounds zset,
--     [12...] the lease strings, then the term strings of shards 0, 1, ...
-- ARGV[1] job id   [2] the server's run id now   [3] the new history   [4] the newest version that the caller remembers
-- Returns {OK, version, history} also when repeated | {NOJOB} | {ANOTHER} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'hash', 'zset', 'hash', 'hash', 'stream', 'hash', 'zset', 'string', 'stream', 'zset' })
if bad then return bad end
local at = redis.call('HMGET', KEYS[1], 'id', 'version', 'head', 'history', 'run_id')
local another = another_job(at[1])
if another then return another end
if at[5] == ARGV[2] then return { 'OK', whole(at[2]), at[4] } end
local plan = redis.call('HGET', KEYS[4], 'text')
redis.call('DEL', KEYS[5], KEYS[9]) -- first, since it is allowed when memory is full
-- The open plan continues in the new history: the rounds of contributions rejected from it end with its commit.
if plan then
  plan = cjson.decode(plan)
  plan.history = ARGV[3]
  redis.call('HSET', KEYS[4], 'history', plan.history, 'text', plan_encode(plan))
end
local keys = { units = KEYS[7], free_units = KEYS[8] }
local all = redis.call('HGETALL', KEYS[2])
for i = 1, #all, 2 do
  local entry = cjson.decode(all[i + 1])
  if entry.state == 'active' then
    drop_unit(entry, keys)
    entry.state = 'rejoining'
    redis.call('HSET', KEYS[2], all[i], cjson.encode(entry))
    redis.call('ZADD', KEYS[3], now_ms(), all[i])
  end
end
local first, shards = 12, (#KEYS - 11) / 2
for i = first, first + shards - 1 do
  local term = redis.call('GET', KEYS[i + shards])
  local number = term and tonumber(term:match('^%w+%-(%d+)%-')) or 0
  redis.call('DEL', KEYS[i])
  redis.call('SET', KEYS[i + shards], ARGV[3] .. '-' .. count(number + 1) .. '-recover')
end
redis.call('HSET', KEYS[1], 'history', ARGV[3], 'run_id', ARGV[2])
local lost = math.max(0, (whole(ARGV[4]) or 0) - whole(at[2]))
redis.call('XADD', KEYS[6], '*', 'kind', 'recover', 'version', at[2], 'head', at[3], 'history', ARGV[3],
  'before', at[4], 'lost', count(lost))
wake(KEYS[10], lowest_round(KEYS[11]))
return { 'OK', whole(at[2]), ARGV[3] }
