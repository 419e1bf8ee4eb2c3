-- rollback: continue from the version that Redis was last given: the shared memory with all newer ones is lost. As in
-- recover, all terms and incarnations end. Newer contributions are done again, and the answer counts the versions lost.
-- KEYS[1] version hash, [2] workers hash, [3] heartbeat zset, [4] plan hash, [5] ready hash, [6] commits stream,
--     [7] units hash, [8] pin string, [9] clock hash, [10] skip hash, [11] inbox stream, [12] mirror string,
--     [13] lease string, [14] term string, [15] turns stream, [16] free units zset, [17] rounds zset, [18] pushed zset,
--     [19] draining zset, [20] finished set, [21] ranks hash, [22] config hash
-- ARGV[1] job id   [2] term   [3] the new history   [4] the shared memory that the job is in from now on
-- Returns {OK, version, versions lost} also when repeated | {TERM, term} | {NOMIRROR} | {NOJOB} | {ANOTHER}
--     | {RESTARTED} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'hash', 'zset', 'hash', 'hash', 'stream', 'hash', 'string', 'hash', 'hash', 'stream',
  'string', 'string', 'string', 'stream', 'zset', 'zset', 'zset', 'zset', 'set', 'hash', 'hash' })
if bad then return bad end
local at = redis.call('HMGET', KEYS[1], 'id', 'version', 'history', 'run_id')
local refused = another_job(at[1]) or restarted(at[4])
if refused then return refused end
if at[3] == ARGV[3] then
  for _, entry in ipairs(redis.call('XREVRANGE', KEYS[6], '+', '-', 'COUNT', 500)) do
    if entry[2][2] == 'recover' then return { 'OK', whole(entry[2][4]), whole(entry[2][12]) } end
  end
end
local holds = redis.call('GET', KEYS[14]) or ''
if holds ~= ARGV[2] then return { 'TERM', holds } end
local text = redis.call('GET', KEYS[12])
if not text then return { 'NOMIRROR' } end
local mirror = cjson.decode(text)
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11], KEYS[13])
for key, hash in pairs({ [KEYS[2]] = mirror.workers, [KEYS[7]] = mirror.units, [KEYS[9]] = mirror.clock, [KEYS[10]] = mirror.skip }) do
  for field, value in pairs(hash) do redis.call('HSET', key, field, value) end
end
for worker, entry in pairs(mirror.workers) do
  if cjson.decode(entry).state == 'rejoining' then redis.call('ZADD', KEYS[3], now_ms(), worker) end
end
index_members({ version = KEYS[1], workers = KEYS[2], units = KEYS[7], clock = KEYS[9], skip = KEYS[10],
  free_units = KEYS[16], rounds = KEYS[17], pushed = KEYS[18], draining = KEYS[19], finished = KEYS[20], ranks = KEYS[21] })
-- Log entries behind the mirrored version are undone and deleted. Those of earlier losses, of server or memory, stay.
local behind = mirror.entry
repeat
  local entries = redis.call('XRANGE', KEYS[6], '(' .. behind, '+', 'COUNT', 500)
  for _, entry in ipairs(entries) do
    if entry[2][2] ~= 'recover' then redis.call('XDEL', KEYS[6], entry[1]) end
    behind = entry[1]
  end
until #entries == 0
local number = tonumber(holds:match('^%w+%-(%d+)%-')) or 0
redis.call('SET', KEYS[14], ARGV[3] .. '-' .. count(number + 1) .. '-rollback')
redis.call('HSET', KEYS[22], 'memory', ARGV[4])
redis.call('HSET', KEYS[1], 'version', mirror.version, 'head', mirror.head, 'history', ARGV[3],
  'shard:0', mirror.name, 'before:0', mirror.name)
local lost = whole(at[2]) - whole(mirror.version)
redis.call('XADD', KEYS[6], '*', 'kind', 'recover', 'version', mirror.version, 'head', mirror.head,
  'history', ARGV[3], 'before', at[3], 'lost', count(lost))
wake(KEYS[15], lowest_round(KEYS[17]))
return { 'OK', whole(mirror.version), lost }
