-- ready: note that a shard's holder has staged its part of a plan; the last shard's call flips all to the new version.
-- KEYS[1] version hash, [2] config hash, [3] clock hash, [4] skip hash, [5] inbox stream, [6] plan hash,
--     [7] ready hash, [8] commits stream, [9] pin string, [10] units hash, [11] free units zset, [12] rounds zset,
--     [13] draining zset, [14] turns stream, [15...] the term strings of shards 0, 1, ...
-- ARGV[1] job id   [2] shard   [3] term   [4] plan id   [5] version   [6] head before   [7] history
--     [8] digest of the weights
-- Returns {FLIPPED, version, pin, commit id} | {READY, shards ready} | {ALREADY, version}: repeated after the flip, or
--     the version is past | {NOPLAN} | {TERM, term} | {PLAN, id} | {HEAD, head} | {HISTORY, history} | {RESTARTED}
--     | {DIGEST, digest}: this term staged something else | {NOJOB} | {ANOTHER} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'hash', 'hash', 'hash', 'stream', 'hash', 'hash', 'stream', 'string', 'hash', 'zset',
  'zset', 'zset', 'stream' })
if bad then return bad end
local at = redis.call('HMGET', KEYS[1], 'id', 'version', 'head', 'history', 'run_id', 'furthest')
local another = another_job(at[1])
if another then return another end
local shard, term, version = ARGV[2], ARGV[3], whole(ARGV[5])
local lost = restarted(at[5])
if lost then return lost end
if at[4] ~= ARGV[7] then return { 'HISTORY', at[4] } end
if whole(at[2]) >= version then return { 'ALREADY', at[2] } end
local holds = redis.call('GET', KEYS[15 + shard]) or ''
if holds ~= term then return { 'TERM', holds } end
local plan = redis.call('HMGET', KEYS[6], 'id', 'version', 'head', 'through')
if not plan[1] then return { 'NOPLAN' } end
if plan[1] ~= ARGV[4] or plan[2] ~= ARGV[5] then return { 'PLAN', plan[1] } end
if version ~= whole(at[2]) + 1 or at[3] ~= ARGV[6] or plan[3] ~= ARGV[6] then return { 'HEAD', at[3] } end
local mine = term .. ' ' .. ARGV[8]
local before = redis.call('HGET', KEYS[7], shard)
if before and before ~= mine then return { 'DIGEST', before } end
local staged, shards = {}, #KEYS - 14
for i = 0, shards - 1 do
  staged[i + 1] = i == tonumber(shard) and mine or redis.call('HGET', KEYS[7], count(i)) or ''
  -- Another shard may have a new holder since its old one called ready; then the new one must call ready itself.
  if staged[i + 1]:match('^(%S+)') ~= redis.call('GET', KEYS[15 + i]) then staged[i + 1] = '' end
end

redis.call('HDEL', KEYS[7], shard) -- first, since it is allowed when memory is full; only a commit frees memory
redis.call('HSET', KEYS[7], shard, mine)
for _, said in ipairs(staged) do
  if said == '' then return { 'READY', redis.call('HLEN', KEYS[7]) } end
end
-- Plan and shards are logged letter by letter as they are hashed, so that anyone can hash them again.
local text, said = redis.call('HGET', KEYS[6], 'text'), table.concat(staged, ',')
local decided, lowest, furthest = cjson.decode(text), lowest_round(KEYS[12]), tonumber(at[6])
local draining, freed, keys = redis.call('ZCARD', KEYS[13]) > 0, false, { units = KEYS[10], free_units = KEYS[11] }
for kind, list in ipairs({ decided.contributions, decided.rejected }) do
  for _, contribution in ipairs(list) do
    local worker, unit = author_and_unit(contribution)
    redis.call('HINCRBY', KEYS[2 + kind], worker, 1) -- the clock, or skip if it was rejected
    local round, last = tonumber(redis.call('ZINCRBY', KEYS[12], 1, worker)), draining and redis.call('ZSCORE', KEYS[13], worker)
    furthest = math.max(furthest, round)
    if last and round >= tonumber(last) then
      for _, key in ipairs({ KEYS[12], KEYS[13] }) do redis.call('ZREM', key, worker) end
    end
    if unit ~= '-' and kind == 1 then
      redis.call('HDEL', KEYS[10], unit)
      redis.call('HINCRBY', KEYS[10], 'done', 1)
    elseif unit ~= '-' then
      freed = free_unit(unit, keys)
    end
  end
end
local ms, number = plan[4]:match('^(%d+)-(%d+)$')
redis.call('XTRIM', KEYS[5], 'MINID', ms .. '-' .. count(number + 1)) -- a plan takes the oldest entries
redis.call('DEL', KEYS[6], KEYS[7])
for i, part in ipairs(staged) do
  local name = 'shard:' .. count(i - 1)
  redis.call('HSET', KEYS[1], 'before:' .. count(i - 1), redis.call('HGET', KEYS[1], name),
    name, ARGV[5] .. '.' .. part:match('^(%S+)'))
end
local head = redis.sha1hex(ARGV[6] .. '\n' .. text .. '\n' .. said)
redis.call('HSET', KEYS[1], 'version', ARGV[5], 'head', head, 'furthest', count(furthest))
redis.call('HINCRBY', KEYS[1], 'contributions', #decided.contributions)
local id = redis.call('XADD', KEYS[8], '*', 'kind', 'commit', 'version', ARGV[5], 'head', head, 'plan', text, 'shards', said)
-- A worker may also wait for its own commit: with a quorum, in ASP, and if max_pending is not above the bound.
local config, after = redis.call('HMGET', KEYS[2], 'staleness', 'max_pending', 'quorum'), lowest_round(KEYS[12])
if after ~= lowest or freed or config[3] ~= '0' or tonumber(config[1]) < 0 or tonumber(config[2]) <= tonumber(config[1]) then
  wake(KEYS[14], after)
end
return { 'FLIPPED', version, redis.call('GET', KEYS[9]) or '', id }
