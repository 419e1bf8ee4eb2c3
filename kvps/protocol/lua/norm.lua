-- norm: note the sums of squares of shards of the open plan's gradient and contributions. Once those of all shards are
-- there, return them, and wake the aggregators that wait for them. The sums follow from the plan alone, so it does not
-- matter who notes them, nor how often.
-- KEYS version:hash plan:hash square_sums:hash norms:stream never
-- ARGV job shards plan_id history sums...
--   sums: shard, its sums, ...
-- USES job numbers
-- Returns {OK, 'mark', mark, shard, its sums, ...} | {SOME, shards noted}: not all are there | {PLAN} | {NOJOB}
--     | {ANOTHER} | {RESTARTED} | {WRONGTYPE, key, is, want}
local refused = read_job(job)
if refused then return refused end
local open_id, open_history = unpack(redis.call('HMGET', keys.plan, 'id', 'history'))
if not open_id or open_id ~= plan_id or open_history ~= history then return { 'PLAN' } end
local mark = history .. ':' .. plan_id

redis.call('XTRIM', keys.norms, 'MAXLEN', 1) -- allowed when memory is full, and lets the script write
if redis.call('HGET', keys.square_sums, 'mark') ~= mark then redis.call('DEL', keys.square_sums) end
local before = redis.call('HLEN', keys.square_sums)
redis.call('HSET', keys.square_sums, 'mark', mark, unpack(sums)) -- of 1,000 shards at the most, two values each
local noted = redis.call('HLEN', keys.square_sums) - 1
if noted < whole(shards) then return { 'SOME', noted } end
if before <= whole(shards) then redis.call('XADD', keys.norms, 'MAXLEN', 1, '*', 'plan', mark) end
local reply = redis.call('HGETALL', keys.square_sums)
table.insert(reply, 1, 'OK')
return reply
