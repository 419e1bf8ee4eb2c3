-- states: what the user of a worker keeps beside the weights, as JSON. The hash `states` has, for each worker, the
-- committed state in the field "w0", and the one before it in "before:w0", both behind the version that made it the
-- committed one: '12 {"epoch": 1}'. The field "w0 8" has a state that waits: it came with the contribution of that round.
-- USES numbers

-- Returns how many of so many waiting contributions a loop looks at: at most as many as the highest max_pending, because
-- a worker may write any number where its rounds stand. `looked` is at how many the script has looked before.
local function bounded(count, looked) return math.max(0, math.min(count, 10000 - looked)) end

local function waiting(worker, round) return worker .. ' ' .. digits(round) end

local function take_state(worker, round)
  local field = waiting(worker, round)
  local state = redis.call('HGET', keys.states, field)
  if state then redis.call('HDEL', keys.states, field) end
  return state
end

-- Moves a state that waits to another round, unless one waits there.
local function move_state(worker, from, to)
  local state = take_state(worker, from)
  if state then redis.call('HSETNX', keys.states, waiting(worker, to), state) end
end

local function set_state(worker, state, version)
  local before = redis.call('HGET', keys.states, worker) or ''
  redis.call('HSET', keys.states, 'before:' .. worker, before, worker, version .. ' ' .. state)
end

-- Makes the states that came with contributions the committed ones of their workers. In rounds of units, a worker's later
-- contribution may be committed before an earlier one. So each takes what waits longest: the committed state is the one
-- that the worker had with as many contributions as its clock counts. `done` has each worker's last round before these.
local function commit_states(contributions, done, version)
  if redis.call('EXISTS', keys.states) == 0 then return end
  local newest = {}
  for _, contribution in ipairs(contributions) do
    local worker = contribution:match('^%S+')
    done[worker] = done[worker] + 1
    newest[worker] = take_state(worker, done[worker]) or newest[worker]
  end
  for worker, state in pairs(newest) do set_state(worker, state, version) end
end

-- The state of a rejected contribution comes with the worker's next one, unless that has its own. The states of earlier
-- ones that wait on wait for a later round, because the rejected one ends a round before them. If a later one of the
-- worker is committed already, what it kept with that is as old as the clock now.
local function pass_states_on(rejected, done, version)
  if #rejected == 0 or redis.call('EXISTS', keys.states) == 0 then return end
  local rounds, looked = {}, 0
  for i, contribution in ipairs(rejected) do
    local worker, round = contribution:match('^(%S+) %S+ %S+ (%S+)')
    rounds[i] = { worker = worker, round = tonumber(round) }
  end
  table.sort(rounds, function(one, other) return one.round < other.round end)
  for _, each in ipairs(rounds) do
    local worker, round, ended = each.worker, each.round, done[each.worker] + 1
    done[worker] = ended
    if round < ended then
      local state = take_state(worker, ended)
      if state then set_state(worker, state, version) end
    else
      move_state(worker, round, round + 1)
      local earlier = bounded(round - ended, looked)
      for back = 1, earlier do move_state(worker, round - back, round - back + 1) end
      looked = looked + earlier
    end
  end
end

-- Returns the newest state of a worker that has pushed `round`, '' for none: of one of its contributions that wait, if
-- there are any.
local function newest_state(worker, round, pending)
  if redis.call('EXISTS', keys.states) == 0 then return '' end
  for back = 0, bounded(pending, 0) - 1 do
    local state = redis.call('HGET', keys.states, waiting(worker, round - back))
    if state then return state end
  end
  return (redis.call('HGET', keys.states, worker) or ''):match('^%S+ (.*)$') or ''
end
