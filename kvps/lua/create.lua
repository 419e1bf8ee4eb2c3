-- create: make a job whose version 0 is staged already.
-- KEYS[1] config hash, [2] layout string, [3] version hash, [4] commits stream, [5] removed string
-- ARGV[1] history, the new job's nonce   [2] layout JSON   [3] server run id   [4] staged name of version 0
--     [5] shards   [6...] field, value, ... of config
-- Returns {OK} also when repeated | {EXISTS} | {REMOVED}: bytes of an earlier one are there
--     | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'string', 'hash', 'stream', 'string' })
if bad then return bad end
local history = redis.call('HGET', KEYS[3], 'history')
if history == ARGV[1] then return { 'OK' } end
if history or redis.call('EXISTS', KEYS[1], KEYS[2]) > 0 then return { 'EXISTS' } end
if redis.call('EXISTS', KEYS[5]) > 0 then return { 'REMOVED' } end

redis.call('HSET', KEYS[1], unpack(ARGV, 6))
redis.call('SET', KEYS[2], ARGV[2])
-- The chain begins with the history, so that two jobs of one name never share a head.
local head = redis.sha1hex(ARGV[1])
redis.call('HSET', KEYS[3], 'version', 0, 'head', head, 'history', ARGV[1], 'id', ARGV[1], 'plan_id', 0, 'server', ARGV[3])
for shard = 0, ARGV[5] - 1 do
  redis.call('HSET', KEYS[3], 'shard:' .. count(shard), ARGV[4], 'before:' .. count(shard), ARGV[4])
end
redis.call('DEL', KEYS[4])
redis.call('XADD', KEYS[4], '*', 'kind', 'create', 'version', 0, 'head', head, 'history', ARGV[1])
return { 'OK' }
