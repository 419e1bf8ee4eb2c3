-- rollback: continue from an earlier version whose bytes are all there, because those of the present one are lost: with
-- shared memory, or with a server of a cluster. As in recover, all terms and incarnations end. Newer contributions are
-- done again, and the answer counts the versions lost.
-- KEYS[1] version hash, [2] workers hash, [3] heartbeat zset, [4] plan hash, [5] ready hash, [6] commits stream,
--     [7] units hash, [8] pin string, [9] clock hash, [10] skip hash, [11] inbox stream, [12] mirror string,
--     [13] turns stream, [14] free units zset, [15] rounds zset, [16] pushed zset, [17] draining zset,
--     [18] finished set, [19] ranks hash, [20] config hash,
--     [21...] the lease strings, then the term strings of shards 0, 1, ...
-- ARGV[1] job id   [2] shard   [3] its term   [4] the new history   [5] the shared memory that the job is in from now on
--     [6] the job at that version as JSON, with the head of the version that it replaces; '' for what `mirror` noted
-- Returns {OK, version, versions lost} also when repeated | {TERM, term} | {HEAD, head} | {NOMIRROR} | {NOJOB}
--     | {ANOTHER} | {RESTARTED} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'hash', 'zset', 'hash', 'hash', 'stream', 'hash', 'string', 'hash', 'hash', 'stream',
  'string', 'stream', 'zset', 'zset', 'zset', 'zset', 'set', 'hash', 'hash' })
if bad then return bad end
local at = redis.call('HMGET', KEYS[1], 'id', 'version', 'history', 'run_id', 'head')
local refused = another_job(at[1]) or restarted(at[4])
if refused then return refused end
if at[3] == ARGV[4] then
  for _, entry in ipairs(redis.call('XREVRANGE', KEYS[6], '+', '-', 'COUNT', 500)) do
    if entry[2][2] == 'recover' then return { 'OK', whole(entry[2][4]), whole(entry[2][12]) } end
  end
end
local leases, shards = 20, (#KEYS - 20) / 2
local terms = leases + shards
local holds = redis.call('GET', KEYS[terms + 1 + ARGV[2]]) or ''
if holds ~= ARGV[3] then return { 'TERM', holds } end
local text = ARGV[6] ~= '' and ARGV[6] or redis.call('GET', KEYS[12])
if not text then return { 'NOMIRROR' } end
local earlier = cjson.decode(text)
if earlier.replaces and earlier.replaces ~= at[5] then return { 'HEAD', at[5] } end
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11])
for key, hash in pairs({ [KEYS[2]] = earlier.workers, [KEYS[7]] = earlier.units, [KEYS[9]] = earlier.clock,
  [KEYS[10]] = earlier.skip }) do
  for field, value in pairs(hash) do redis.call('HSET', key, field, value) end
end
for worker, entry in pairs(earlier.workers) do
  if cjson.decode(entry).state == 'rejoining' then redis.call('ZADD', KEYS[3], now_ms(), worker) end
end
index_members({ version = KEYS[1], workers = KEYS[2], units = KEYS[7], clock = KEYS[9], skip = KEYS[10],
  free_units = KEYS[14], rounds = KEYS[15], pushed = KEYS[16], draining = KEYS[17], finished = KEYS[18], ranks = KEYS[19] })
-- Log entries behind that version are undone and deleted. Those of earlier losses, of server or memory, stay.
local behind = earlier.entry
repeat
  local entries = redis.call('XRANGE', KEYS[6], '(' .. behind, '+', 'COUNT', 500)
  for _, entry in ipairs(entries) do
    if entry[2][2] ~= 'recover' then redis.call('XDEL', KEYS[6], entry[1]) end
    behind = entry[1]
  end
until #entries == 0
for i = 1, shards do
  local term = redis.call('GET', KEYS[terms + i])
  local number = term and tonumber(term:match('^%w+%-(%d+)%-')) or 0
  redis.call('DEL', KEYS[leases + i])
  redis.call('SET', KEYS[terms + i], ARGV[4] .. '-' .. count(number + 1) .. '-rollback')
  redis.call('HSET', KEYS[1], 'shard:' .. count(i - 1), earlier.names[i], 'before:' .. count(i - 1), earlier.names[i])
end
redis.call('HSET', KEYS[20], 'memory', ARGV[5])
redis.call('HSET', KEYS[1], 'version', earlier.version, 'head', earlier.head, 'history', ARGV[4])
local lost = whole(at[2]) - whole(earlier.version)
redis.call('XADD', KEYS[6], '*', 'kind', 'recover', 'version', earlier.version, 'head', earlier.head,
  'history', ARGV[4], 'before', at[3], 'lost', count(lost))
wake(KEYS[13], lowest_round(KEYS[15]))
return { 'OK', whole(earlier.version), lost }
