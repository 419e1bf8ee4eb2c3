-- recover: begin a new history on a server that has begun a new life, and may have lost its last writes. What is there is
-- a whole earlier state; but who remembers more than it must not go on as if it were still true. So all terms and
-- incarnations end here: holders load what is committed, workers join anew and do again what was lost. Until they do, or
-- are silent for too long, the others wait for them.
-- KEYS[1] version hash, [2] workers hash, [3] heartbeat zset, [4] plan string, [5] ready hash, [6] commits stream,
--     [7] units hash, [8] pin string, [9...] the lease strings, then the term strings of shards 0, 1, ...
-- ARGV[1] the server's life now   [2] history of it   [3] the newest version that the caller remembers
-- Returns {OK, version, history} also when repeated | {NOJOB} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'hash', 'zset', 'string', 'hash', 'stream', 'hash', 'string' })
if bad then return bad end
local at = redis.call('HMGET', KEYS[1], 'version', 'head', 'history', 'server')
if not at[1] then return { 'NOJOB' } end
if at[4] == ARGV[1] then return { 'OK', whole(at[1]), at[3] } end
local open = redis.call('GET', KEYS[4])
redis.call('DEL', KEYS[4], KEYS[5], KEYS[8]) -- first, since it is allowed when memory is full
-- The open plan goes on in the new history: what was rejected from it is settled when its version is committed.
if open then
  redis.call('SET', KEYS[4], (open:gsub('"history":"[^"]*"', '"history":"' .. ARGV[2] .. '"', 1)))
end
local all = redis.call('HGETALL', KEYS[2])
for i = 1, #all, 2 do
  local entry = cjson.decode(all[i + 1])
  if entry.state == 'active' then
    drop_unit(entry, KEYS[7])
    entry.state = 'rejoining'
    redis.call('HSET', KEYS[2], all[i], cjson.encode(entry))
    redis.call('ZADD', KEYS[3], now_ms(), all[i])
  end
end
local shards = (#KEYS - 8) / 2
for i = 9, 8 + shards do
  local term = redis.call('GET', KEYS[i + shards])
  local number = term and tonumber(term:match('^%w+%-(%d+)%-')) or 0
  redis.call('DEL', KEYS[i])
  redis.call('SET', KEYS[i + shards], ARGV[2] .. '-' .. count(number + 1) .. '-recover')
end
redis.call('HSET', KEYS[1], 'history', ARGV[2], 'server', ARGV[1])
local lost = math.max(0, (whole(ARGV[3]) or 0) - whole(at[1]))
redis.call('XADD', KEYS[6], '*', 'kind', 'recover', 'version', at[1], 'head', at[2], 'history', ARGV[2],
  'before', at[3], 'lost', count(lost))
return { 'OK', whole(at[1]), ARGV[2] }
