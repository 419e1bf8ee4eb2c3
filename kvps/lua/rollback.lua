-- rollback: go on from the version that Redis was last given, for the shared memory with what came since is lost. As in
-- recover, all terms and incarnations end here; what was accepted or committed since is done again, and said in numbers.
-- KEYS[1] version hash, [2] workers hash, [3] heartbeat zset, [4] plan string, [5] ready hash, [6] commits stream,
--     [7] units hash, [8] pin string, [9] clock hash, [10] inbox stream, [11] mirror string, [12] lease string,
--     [13] term string, [14] config hash
-- ARGV[1] term   [2] history from here on   [3] the shared memory that the job is in from here on
-- Returns {OK, version, versions lost} also when repeated | {TERM, term} | {NOMIRROR} | {NOJOB} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'hash', 'zset', 'string', 'hash', 'stream', 'hash', 'string', 'hash', 'stream',
  'string', 'string', 'string', 'hash' })
if bad then return bad end
local at = redis.call('HMGET', KEYS[1], 'version', 'history')
if not at[1] then return { 'NOJOB' } end
if at[2] == ARGV[2] then
  for _, entry in ipairs(redis.call('XREVRANGE', KEYS[6], '+', '-', 'COUNT', 500)) do
    if entry[2][2] == 'recover' then return { 'OK', whole(entry[2][4]), whole(entry[2][12]) } end
  end
end
local holds = redis.call('GET', KEYS[13]) or ''
if holds ~= ARGV[1] then return { 'TERM', holds } end
local text = redis.call('GET', KEYS[11])
if not text then return { 'NOMIRROR' } end
local mirror = cjson.decode(text)
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[12])
for key, hash in pairs({ [KEYS[2]] = mirror.workers, [KEYS[7]] = mirror.units, [KEYS[9]] = mirror.clock }) do
  for field, value in pairs(hash) do redis.call('HSET', key, field, value) end
end
for worker, entry in pairs(mirror.workers) do
  if cjson.decode(entry).state == 'rejoining' then redis.call('ZADD', KEYS[3], now_ms(), worker) end
end
-- What stands behind it in the log has not happened, but for earlier losses: the server's own, or of memory.
local behind = mirror.entry
repeat
  local entries = redis.call('XRANGE', KEYS[6], '(' .. behind, '+', 'COUNT', 500)
  for _, entry in ipairs(entries) do
    if entry[2][2] ~= 'recover' then redis.call('XDEL', KEYS[6], entry[1]) end
    behind = entry[1]
  end
until #entries == 0
local number = tonumber(holds:match('^%w+%-(%d+)%-')) or 0
redis.call('SET', KEYS[13], ARGV[2] .. '-' .. count(number + 1) .. '-rollback')
redis.call('HSET', KEYS[14], 'memory', ARGV[3])
redis.call('HSET', KEYS[1], 'version', mirror.version, 'head', mirror.head, 'history', ARGV[2],
  'shard:0', mirror.name, 'before:0', mirror.name)
local lost = whole(at[1]) - whole(mirror.version)
redis.call('XADD', KEYS[6], '*', 'kind', 'recover', 'version', mirror.version, 'head', mirror.head,
  'history', ARGV[2], 'before', at[2], 'lost', count(lost))
return { 'OK', whole(mirror.version), lost }
