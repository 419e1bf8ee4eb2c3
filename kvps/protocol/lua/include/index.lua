-- index: the sets that scripts read instead of looking at every worker and unit.
-- USES numbers replies workers

-- Makes the sets from the job's hashes, so this works only while no contribution waits.
local function index_members()
  redis.call('DEL', keys.rounds, keys.pushed, keys.draining, keys.finished, keys.ranks, keys.free_units,
    keys.taken_units)
  local function number(key, field) return tonumber(redis.call('HGET', key, field) or '0') end
  local contributions, furthest = 0, 0
  for worker, text in each_pair(redis.call('HGETALL', keys.workers)) do
    local entry, clock = cjson.decode(text), number(keys.clock, worker)
    local round = clock + number(keys.skip, worker)
    contributions, furthest = contributions + clock, math.max(furthest, round)
    redis.call('HSET', keys.ranks, digits(entry.rank), worker)
    if entry.finished then redis.call('SADD', keys.finished, worker) end
    if in_clock(entry) then
      redis.call('ZADD', keys.rounds, round, worker)
      redis.call('ZADD', keys.pushed, round, worker)
    end
  end
  for unit, state in each_pair(redis.call('HGETALL', keys.units)) do
    if state == 'free' then redis.call('ZADD', keys.free_units, unit, unit) end
  end
  redis.call('HSET', keys.version, 'contributions', digits(contributions), 'furthest', digits(furthest), 'free_rank', 0)
end
