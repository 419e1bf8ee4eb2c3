-- Stands before every script: the checks that all scripts need, and the functions that change membership.
--
-- Lua does not roll back, so each script makes all its checks first and writes last. Only `whole` reads numbers from
-- outside: tonumber accepts nan, 0x10 and 1e3, and doubles above 2^53 do not hold every whole number.

-- The last key is one that never exists. While a cluster moves a slot, some of its keys are on another node, and a script
-- would fail in the middle of its writes at the first of them. A script that names a key which is not there is told
-- TRYAGAIN then, before it begins.
table.remove(KEYS)

local function whole(text)
  if type(text) ~= 'string' or #text > 16 or not text:find('^%d+$') then return nil end
  local number = tonumber(text)
  return number < 9007199254740992 and number or nil
end

local function count(number) return string.format('%.0f', number) end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- A key of another type would make the script fail in the middle of its writes.
local function wrong_type(types)
  for i, want in ipairs(types) do
    local is = redis.call('TYPE', KEYS[i]).ok
    if is ~= 'none' and is ~= want then return { 'WRONGTYPE', KEYS[i], is, want } end
  end
end

-- A job that was created under the name of a removed job is a different job: a script does nothing for a caller that
-- still means the removed one. `id` is the id in the version hash, ARGV[1] the id of the job that the caller means.
local function another_job(id)
  if id ~= ARGV[1] then return { id and 'ANOTHER' or 'NOJOB' } end
end

-- A server that was restarted, or a replica that was promoted, may have lost its last writes. Until a new history has
-- begun, no script accepts, commits or deletes anything, because its caller may remember more than the server does.
-- Nothing else is written either: the append-only file may end in half a transaction, and the next start would run that
-- half together with whatever a script writes behind it. The history begins when the server has rewritten the file.
local function restarted(noted)
  if not redis.call('INFO', 'server'):find('run_id:' .. noted, 1, true) then return { 'RESTARTED' } end
end

-- Lua can pass some 8,000 values to one call, so large sets are deleted in slices.
local function delete_keys(keys, from)
  local deleted = 0
  for i = from, #keys, 1000 do
    deleted = deleted + redis.call('DEL', unpack(keys, i, math.min(i + 999, #keys)))
  end
  return deleted
end

-- Appends entries to a trace, each a text of fields and values. The traces of a thousand workers take no more room than
-- those of sixty.
local function append(key, entries, from, workers)
  local most = math.max(50, math.min(1000, math.floor(60000 / workers)))
  for number = from, #entries do
    local values = {}
    for value in entries[number]:gmatch('%S+') do values[#values + 1] = value end
    redis.call('XADD', key, 'MAXLEN', '~', most, '*', unpack(values))
  end
end

local function worker_entry(key, worker)
  local text = redis.call('HGET', key, worker)
  return text and cjson.decode(text)
end

-- Whether a worker is in the vector clock. A restart of the server cut off a rejoining worker: the others wait for it.
local function counts(entry) return entry.state == 'active' or entry.state == 'rejoining' end

-- Returns the sum of the weights of all contributions that were accepted from a worker, as text. In a job whose rounds
-- end by the clock it tells which batch is the worker's next.
local function sums_of(entry) return type(entry.weight_sums) == 'string' and entry.weight_sums or '0' end
local function weight_sum(entry) return sums_of(entry):match('%d*$') end

-- Adds the weight of a contribution that is accepted now. The entry also has the sums before it, from before the oldest
-- that may wait on: a version that is gone back to has not all that was accepted.
local function weigh(entry, weight, max_pending)
  local sums = {}
  for sum in sums_of(entry):gmatch('%d+') do sums[#sums + 1] = sum end
  sums[#sums + 1] = count(math.min((whole(sums[#sums]) or 0) + weight, 9007199254740991))
  entry.weight_sums = table.concat(sums, ' ', math.max(1, #sums - 2 * max_pending))
end

-- Frees a unit of data: the next worker that asks gets it.
local function free_unit(unit, keys)
  redis.call('HSET', keys.units, unit, 'free')
  redis.call('ZADD', keys.free_units, unit, unit)
  return true
end

-- Frees the unit that a worker has taken and not pushed. Returns whether there was one.
local function drop_unit(entry, keys)
  local unit = entry.unit
  entry.unit = nil
  return unit ~= nil and free_unit(unit, keys)
end

-- Takes a worker out of the vector clock. Contributions of it that wait still commit; until then it is draining.
local function depart(worker, entry, state, keys)
  local waits = entry.round > tonumber(redis.call('ZSCORE', keys.rounds, worker) or '0')
  entry.state = state
  redis.call('ZREM', keys.pushed, worker)
  if waits then
    redis.call('ZADD', keys.draining, entry.round, worker)
  else
    redis.call('ZREM', keys.rounds, worker)
  end
  return waits and 'draining' or 'gone'
end

local function lowest_round(rounds) return redis.call('ZRANGE', rounds, 0, 0, 'WITHSCORES')[2] end

-- Wakes the workers that wait for their turn. They wait on this small stream and not on the log: there, each of 1,000
-- workers would be woken by every join of another, and would read every commit's entry.
local function wake(turns, lowest) redis.call('XADD', turns, 'MAXLEN', '~', 100, '*', 'lowest', lowest or '') end

-- Rebuilds the sets that scripts read instead of looking at every worker and unit. They are made from the job's hashes,
-- so this works only while no contribution waits.
local function index_members(keys)
  redis.call('DEL', keys.rounds, keys.pushed, keys.draining, keys.finished, keys.ranks, keys.free_units)
  local function number(key, field) return tonumber(redis.call('HGET', key, field) or '0') end
  local contributions, furthest = 0, 0
  local all = redis.call('HGETALL', keys.workers)
  for i = 1, #all, 2 do
    local worker, entry = all[i], cjson.decode(all[i + 1])
    local clock = number(keys.clock, worker)
    local round = clock + number(keys.skip, worker)
    contributions, furthest = contributions + clock, math.max(furthest, round)
    redis.call('HSET', keys.ranks, count(entry.rank), worker)
    if entry.finished then redis.call('SADD', keys.finished, worker) end
    if counts(entry) then
      redis.call('ZADD', keys.rounds, round, worker)
      redis.call('ZADD', keys.pushed, round, worker)
    end
  end
  local units = redis.call('HGETALL', keys.units)
  for i = 1, #units, 2 do
    if units[i + 1] == 'free' then redis.call('ZADD', keys.free_units, units[i], units[i]) end
  end
  redis.call('HSET', keys.version, 'contributions', count(contributions), 'furthest', count(furthest), 'free_rank', 0)
end

-- Returns the text of a plan. The text is hashed and logged letter by letter, so only this function makes it: cjson
-- would write an empty list as an empty object. The text of a contribution has no quote and no backslash.
local function plan_encode(plan)
  local function list(items) return #items > 0 and '["' .. table.concat(items, '","') .. '"]' or '[]' end
  return string.format('{"id":%s,"version":%s,"head":"%s","history":"%s","divisor":%s,"progress":%s,'
    .. '"contributions":%s,"rejected":%s}', count(plan.id), count(plan.version), plan.head, plan.history,
    count(plan.divisor), count(plan.progress), list(plan.contributions), list(plan.rejected))
end

-- Returns the worker that made a contribution, and the unit of data that it used ('-' for none).
local function author_and_unit(contribution)
  return contribution:match('^(%S+) %S+ %S+ %S+ %S+ %S+ (%S+)')
end
