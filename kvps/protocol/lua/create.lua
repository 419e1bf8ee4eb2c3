-- create: make a job whose first version is already staged: version 0, or the version of a checkpoint.
-- KEYS[1] version hash, [2] config hash, [3] layout string, [4] commits stream, [5] removed string, [6] clock hash,
--     [7] skip hash, [8] workers hash, [9] units hash, [10] free units zset, [11] rounds zset, [12] pushed zset,
--     [13] draining zset, [14] finished set, [15] ranks hash
-- ARGV[1] job id, a nonce; also the first history   [2] layout JSON   [3] server run id   [4] staged name of the first
--     version   [5] shards   [6] '' or the checkpoint as JSON, every value as text: version, head, contributions, job,
--     id, clock, skip, workers, units   [7...] field, value, ... of config
-- Returns {OK} also when repeated | {EXISTS} | {REMOVED}: an earlier job is being removed | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'hash', 'string', 'stream', 'string', 'hash', 'hash', 'hash', 'hash', 'zset', 'zset',
  'zset', 'zset', 'set', 'hash' })
if bad then return bad end
local id = redis.call('HGET', KEYS[1], 'id')
if id == ARGV[1] then return { 'OK' } end
if id or redis.call('EXISTS', KEYS[1], KEYS[2], KEYS[3]) > 0 then return { 'EXISTS' } end
if redis.call('EXISTS', KEYS[5]) > 0 then return { 'REMOVED' } end
local from = ARGV[6] ~= '' and cjson.decode(ARGV[6])

redis.call('DEL', KEYS[4], KEYS[6], KEYS[7], KEYS[8], KEYS[9])
redis.call('HSET', KEYS[2], unpack(ARGV, 7))
redis.call('SET', KEYS[3], ARGV[2])
-- The chain starts from the id, so that two jobs of one name never share a head; or it continues a checkpoint's.
local version, head = from and from.version or '0', from and from.head or redis.sha1hex(ARGV[1])
redis.call('HSET', KEYS[1], 'version', version, 'head', head, 'history', ARGV[1], 'id', ARGV[1], 'plan_id', 0, 'run_id', ARGV[3])
for shard = 0, ARGV[5] - 1 do
  redis.call('HSET', KEYS[1], 'shard:' .. count(shard), ARGV[4], 'before:' .. count(shard), ARGV[4])
end
if from then
  redis.call('HSET', KEYS[1], 'from_version', version, 'from_head', head, 'from_contributions', from.contributions)
  for key, hash in pairs({ [KEYS[6]] = from.clock, [KEYS[7]] = from.skip, [KEYS[8]] = from.workers, [KEYS[9]] = from.units }) do
    for field, value in pairs(hash) do redis.call('HSET', key, field, value) end
  end
  redis.call('XADD', KEYS[4], '*', 'kind', 'restore', 'version', version, 'head', head, 'history', ARGV[1],
    'contributions', from.contributions, 'job', from.job, 'id', from.id)
else
  redis.call('XADD', KEYS[4], '*', 'kind', 'create', 'version', 0, 'head', head, 'history', ARGV[1])
end
index_members({ version = KEYS[1], clock = KEYS[6], skip = KEYS[7], workers = KEYS[8], units = KEYS[9],
  free_units = KEYS[10], rounds = KEYS[11], pushed = KEYS[12], draining = KEYS[13], finished = KEYS[14], ranks = KEYS[15] })
return { 'OK' }
