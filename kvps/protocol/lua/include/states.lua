-- states: what the user of a worker keeps beside the weights, as JSON. The hash `states` has, for each worker, the
-- committed state in the field "w0", and the one before it in "before:w0", both behind the incarnation and sequence
-- number of the contribution with which they came: '2-af31:7 {"epoch": 1}'. The field "w0 2-af31:8" has the state that
-- came with a contribution that waits.

-- Returns whether a contribution, "<incarnation>:<seq>", is newer than another one of its worker, or than none.
local function is_newer(mark, than)
  local incarnation, seq = mark:match('^(%d+)[^:]*:(%d+)')
  local other, other_seq = (than or ''):match('^(%d+)[^:]*:(%d+)')
  incarnation, other = tonumber(incarnation or '0'), tonumber(other or '0')
  return incarnation > other or (incarnation == other and tonumber(seq or '0') > tonumber(other_seq or '0'))
end

-- Returns the worker of a contribution, which of its contributions it is, and the field of the state that came with it.
local function marked(contribution)
  local worker, incarnation, seq = contribution:match('^(%S+) (%S+) (%S+)')
  local mark = incarnation .. ':' .. seq
  return worker, mark, worker .. ' ' .. mark
end

local function drop_state(contribution)
  local _, _, field = marked(contribution)
  redis.call('HDEL', keys.states, field)
end

-- Makes the states that came with contributions the committed ones of their workers. In rounds of units, a worker's later
-- contribution may be committed first; then its state stays.
local function commit_states(contributions)
  if redis.call('EXISTS', keys.states) == 0 then return end
  local newest = {}
  for _, contribution in ipairs(contributions) do
    local worker, mark, field = marked(contribution)
    local state = redis.call('HGET', keys.states, field)
    if state then
      redis.call('HDEL', keys.states, field)
      if is_newer(mark, newest[worker]) then newest[worker] = mark .. ' ' .. state end
    end
  end
  for worker, state in pairs(newest) do
    local committed = redis.call('HGET', keys.states, worker) or ''
    if is_newer(state, committed) then redis.call('HSET', keys.states, 'before:' .. worker, committed, worker, state) end
  end
end

-- Returns the newest state of a worker, '' for none: of a contribution that waits, if there is one.
local function newest_state(worker, pending)
  local newest = redis.call('HGET', keys.states, worker) or ''
  for _, field in ipairs(pending > 0 and redis.call('HKEYS', keys.states) or {}) do
    local mark = field:sub(1, #worker + 1) == worker .. ' ' and field:sub(#worker + 2)
    if mark and is_newer(mark, newest) then newest = mark .. ' ' .. redis.call('HGET', keys.states, field) end
  end
  return newest:match('^%S+ (.*)$') or ''
end
