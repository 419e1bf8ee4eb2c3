-- norm: note the sums of squares of shards of the open plan's gradient and contributions, and tell those of all shards.
-- They follow from the plan alone, so it does not matter who notes them, nor how often.
-- KEYS[1] version hash, [2] plan hash, [3] norms stream
-- ARGV[1] job id   [2] plan id   [3] history   [4] the number of shards   [5...] shard, its sums, ...
-- Returns {OK, shard, its sums, ...} | {PLAN} | {NOJOB} | {ANOTHER} | {RESTARTED} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'hash', 'stream' })
if bad then return bad end
local at = redis.call('HMGET', KEYS[1], 'id', 'run_id')
local refused = another_job(at[1]) or restarted(at[2])
if refused then return refused end
local open = redis.call('HMGET', KEYS[2], 'id', 'history')
if not open[1] or open[1] ~= ARGV[2] or open[2] ~= ARGV[3] then return { 'PLAN' } end
local mark, shards, sums = ARGV[3] .. ':' .. ARGV[2], whole(ARGV[4]), {}
for _, item in ipairs(redis.call('XRANGE', KEYS[3], '-', '+')) do
  if item[2][2] == mark then sums[item[2][4]] = item[2][6] end
end

redis.call('XTRIM', KEYS[3], 'MAXLEN', shards) -- allowed when memory is full, and lets the script write
for i = 5, #ARGV, 2 do
  if not sums[ARGV[i]] then
    sums[ARGV[i]] = ARGV[i + 1]
    redis.call('XADD', KEYS[3], 'MAXLEN', shards, '*', 'plan', mark, 'shard', ARGV[i], 'sums', ARGV[i + 1])
  end
end
local answer = { 'OK' }
for shard, said in pairs(sums) do
  answer[#answer + 1], answer[#answer + 2] = shard, said
end
return answer
