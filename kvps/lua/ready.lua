-- ready: a shard's holder has staged its part of a plan; the last of them flips all shards to the new version.
-- KEYS[1] version hash, [2] clock hash, [3] workers hash, [4] inbox stream, [5] plan string, [6] ready hash,
--     [7] commits stream, [8] pin string, [9] units hash, [10...] the term strings of shards 0, 1, ...
-- ARGV[1] shard   [2] term   [3] plan id   [4] version   [5] head before   [6] history   [7] digest of the weights
-- Returns {FLIPPED, version, pin, commit id} | {READY, shards ready} | {ALREADY, version}: this call flipped before,
--     or the version is past | {NOPLAN} | {TERM, term} | {PLAN, id} | {HEAD, head} | {HISTORY, history} | {LIFE}
--     | {NOJOB}--     | {DIGEST, digest}: one term staged two things | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'hash', 'hash', 'stream', 'string', 'hash', 'stream', 'string', 'hash' })
if bad then return bad end
local shard, term, version = ARGV[1], ARGV[2], whole(ARGV[4])
local at = redis.call('HMGET', KEYS[1], 'version', 'head', 'history', 'server')
if not at[1] then return { 'NOJOB' } end
local lost = another_life(at[4])
if lost then return lost end
if at[3] ~= ARGV[6] then return { 'HISTORY', at[3] } end
if whole(at[1]) >= version then return { 'ALREADY', at[1] } end
local holds = redis.call('GET', KEYS[10 + shard]) or ''
if holds ~= term then return { 'TERM', holds } end
local text = redis.call('GET', KEYS[5])
if not text then return { 'NOPLAN' } end
local plan = cjson.decode(text)
if plan.id ~= whole(ARGV[3]) or plan.version ~= version then return { 'PLAN', plan.id } end
if version ~= whole(at[1]) + 1 or at[2] ~= ARGV[5] or plan.head ~= ARGV[5] then return { 'HEAD', at[2] } end
local mine = term .. ' ' .. ARGV[7]
local before = redis.call('HGET', KEYS[6], shard)
if before and before ~= mine then return { 'DIGEST', before } end
local staged, shards = {}, #KEYS - 9
for i = 0, shards - 1 do
  staged[i] = i == tonumber(shard) and mine or redis.call('HGET', KEYS[6], count(i))
  -- The holder of another shard may have changed since it said ready; then its successor must say so again.
  if staged[i] and staged[i]:match('^(%S+)') ~= redis.call('GET', KEYS[10 + i]) then staged[i] = nil end
end

local entries, done = {}, {}
local function settle(author, skipped)
  local entry = entries[author] or worker_entry(KEYS[3], author)
  entry.pending, entry.skip = entry.pending - 1, entry.skip + skipped
  if entry.state == 'draining' and entry.pending == 0 then entry.state = 'gone' end
  entries[author] = entry
end
for i, c in ipairs(plan.contributions) do
  settle(c.worker, 0)
  done[i] = c.id
end
for _, c in ipairs(plan.rejected) do settle(c.worker, 1) end

redis.call('HDEL', KEYS[6], shard) -- first, since it is allowed when memory is full: a commit is what frees it
redis.call('HSET', KEYS[6], shard, mine)
local parts = {}
for i = 0, shards - 1 do
  if not staged[i] then return { 'READY', redis.call('HLEN', KEYS[6]) } end
  parts[i + 1] = staged[i]
end
for _, c in ipairs(plan.contributions) do
  redis.call('HINCRBY', KEYS[2], c.worker, 1)
  if type(c.unit) == 'number' then
    redis.call('HDEL', KEYS[9], count(c.unit))
    redis.call('HINCRBY', KEYS[9], 'done', 1)
  end
end
for _, c in ipairs(plan.rejected) do
  if type(c.unit) == 'number' then redis.call('HSET', KEYS[9], count(c.unit), 'free') end
end
for worker, entry in pairs(entries) do redis.call('HSET', KEYS[3], worker, cjson.encode(entry)) end
if #done > 0 then redis.call('XDEL', KEYS[4], unpack(done)) end
redis.call('DEL', KEYS[5], KEYS[6])
for i = 0, shards - 1 do
  local name = 'shard:' .. count(i)
  redis.call('HSET', KEYS[1], 'before:' .. count(i), redis.call('HGET', KEYS[1], name),
    name, ARGV[4] .. '.' .. parts[i + 1]:match('^(%S+)'))
end
-- The record is logged letter by letter as it was hashed, so that anyone can hash it again.
local said = table.concat(parts, ',')
local head = redis.sha1hex(ARGV[5] .. '\n' .. text .. '\n' .. said)
redis.call('HSET', KEYS[1], 'version', ARGV[4], 'head', head)
local id = redis.call('XADD', KEYS[7], '*', 'kind', 'commit', 'version', ARGV[4], 'head', head, 'plan', text,
  'shards', said)
return { 'FLIPPED', version, redis.call('GET', KEYS[8]) or '', id }
