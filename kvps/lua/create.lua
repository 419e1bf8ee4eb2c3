-- create: make a job whose first version is staged already: version 0, or that of a checkpoint.
-- KEYS[1] config hash, [2] layout string, [3] version hash, [4] commits stream, [5] removed string, [6] clock hash,
--     [7] workers hash, [8] units hash
-- ARGV[1] history, the new job's nonce   [2] layout JSON   [3] server run id   [4] staged name of the first version
--     [5] shards   [6] '' or, all of it text, the checkpoint as JSON: version, head, contributions, job, id, clock,
--     workers, units   [7...] field, value, ... of config
-- Returns {OK} also when repeated | {EXISTS} | {REMOVED}: bytes of an earlier one are there
--     | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'string', 'hash', 'stream', 'string', 'hash', 'hash', 'hash' })
if bad then return bad end
local history = redis.call('HGET', KEYS[3], 'history')
if history == ARGV[1] then return { 'OK' } end
if history or redis.call('EXISTS', KEYS[1], KEYS[2]) > 0 then return { 'EXISTS' } end
if redis.call('EXISTS', KEYS[5]) > 0 then return { 'REMOVED' } end
local from = ARGV[6] ~= '' and cjson.decode(ARGV[6])

redis.call('DEL', KEYS[4], KEYS[6], KEYS[7], KEYS[8])
redis.call('HSET', KEYS[1], unpack(ARGV, 7))
redis.call('SET', KEYS[2], ARGV[2])
-- The chain begins with the history, so that two jobs of one name never share a head; or it goes on.
local version, head = from and from.version or '0', from and from.head or redis.sha1hex(ARGV[1])
redis.call('HSET', KEYS[3], 'version', version, 'head', head, 'history', ARGV[1], 'id', ARGV[1], 'plan_id', 0, 'server', ARGV[3])
for shard = 0, ARGV[5] - 1 do
  redis.call('HSET', KEYS[3], 'shard:' .. count(shard), ARGV[4], 'before:' .. count(shard), ARGV[4])
end
if not from then
  redis.call('XADD', KEYS[4], '*', 'kind', 'create', 'version', 0, 'head', head, 'history', ARGV[1])
  return { 'OK' }
end
redis.call('HSET', KEYS[3], 'from_version', version, 'from_head', head, 'from_contributions', from.contributions)
for key, hash in pairs({ [KEYS[6]] = from.clock, [KEYS[7]] = from.workers, [KEYS[8]] = from.units }) do
  for field, value in pairs(hash) do redis.call('HSET', key, field, value) end
end
redis.call('XADD', KEYS[4], '*', 'kind', 'restore', 'version', version, 'head', head, 'history', ARGV[1],
  'contributions', from.contributions, 'job', from.job, 'id', from.id)
return { 'OK' }
