-- norm: note the sums of squares of shards of the open plan's gradient and contributions, and return those of all
-- shards. They follow from the plan alone, so it does not matter who notes them, nor how often.
-- KEYS version:hash plan:hash norms:stream never
-- ARGV job plan_id history shards sums...
--   sums: shard, its sums, ...
-- USES job numbers replies
-- Returns {OK, shard, its sums, ...} | {PLAN} | {NOJOB} | {ANOTHER} | {RESTARTED} | {WRONGTYPE, key, is, want}
local refused = read_job(job)
if refused then return refused end
local open_id, open_history = unpack(redis.call('HMGET', keys.plan, 'id', 'history'))
if not open_id or open_id ~= plan_id or open_history ~= history then return { 'PLAN' } end
local mark, most, known = history .. ':' .. plan_id, whole(shards), {}
for _, entry in ipairs(redis.call('XRANGE', keys.norms, '-', '+')) do
  local _, fields = read_entry(entry)
  if fields.plan == mark then known[fields.shard] = fields.sums end
end

redis.call('XTRIM', keys.norms, 'MAXLEN', most) -- allowed when memory is full, and lets the script write
for shard, each in each_pair(sums) do
  if not known[shard] then
    known[shard] = each
    redis.call('XADD', keys.norms, 'MAXLEN', most, '*', 'plan', mark, 'shard', shard, 'sums', each)
  end
end
local reply = { 'OK' }
for shard, each in pairs(known) do
  reply[#reply + 1], reply[#reply + 2] = shard, each
end
return reply
