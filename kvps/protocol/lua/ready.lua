-- ready: note that a shard's holder has staged its part of a plan; the last shard's call flips all to the new version.
-- A note of a shard is of its present term: a script that gives it another term deletes the note. So a call looks at its
-- own shard alone, and only the last one at all of them.
-- KEYS version:hash plan:hash ready:hash term(shard):string config:hash clock:hash skip:hash inbox:stream commits:stream
-- KEYS rounds:zset turns:stream pin:string? units:hash? free_units:zset? taken_units:zset? draining:zset? states:hash?
-- KEYS rollouts:hash? items:hash? lots:hash? taken_lots:zset? bases:hash? never
-- READS version plan ready term config rounds
-- ARGV job shard shards term plan_id version head history digest
--   version, head: the version that the plan makes, and the head before it
--   digest: of the weights
-- USES job log numbers pins rollouts rounds staleness states turns units
-- Returns {FLIPPED, version, pin, commit id} | {READY, shards ready} | {ALREADY, version}: repeated after the flip, or
--     the version is past | {NOPLAN} | {TERM, term} | {PLAN, id} | {HEAD, head} | {HISTORY, history} | {RESTARTED}
--     | {DIGEST, digest}: this term staged something else | {TAKEN, lot}: what it is trained on is not taken any
--     more | {NOJOB} | {ANOTHER} | {WRONGTYPE, key, is, want}
local refused, committed, present_head, present_history, furthest, contributions =
  read_job(job, 'version', 'head', 'history', 'furthest', 'contributions')
if refused then return refused end
local next_version = whole(version)
if present_history ~= history then return { 'HISTORY', present_history } end
if whole(committed) >= next_version then return { 'ALREADY', committed } end
local present_term = redis.call('GET', keys.term) or ''
if present_term ~= term then return { 'TERM', present_term } end
local open_id, open_version, open_head, through, ids, of_term, trained = unpack(redis.call('HMGET', keys.plan,
  'id', 'version', 'head', 'through', 'ids', 'term', 'lots'))
if not open_id then return { 'NOPLAN' } end
if open_id ~= plan_id or open_version ~= version then return { 'PLAN', open_id } end
if next_version ~= whole(committed) + 1 or present_head ~= head or open_head ~= head then return { 'HEAD', present_head } end
local mine = term .. ' ' .. digest
local before = redis.call('HGET', keys.ready, shard)
if before and before ~= mine then return { 'DIGEST', before } end
-- What a version is trained on is still taken by the learner that has planned it, or it is not made.
local lots = lots_in(trained)
local untaken, prompts = first_untaken(lots, of_term), #lots > 0 and read_rollouts().units or 0
if untaken then return { 'TAKEN', untaken } end
local closes, bound, rounds, max_pending = read_rule('max_pending')
local lowest, counted = lowest_round(), whole(contributions or '0') + 0 -- fails here if it is no number

redis.call('HDEL', keys.ready, shard) -- first, since it is allowed when memory is full; only a commit frees memory
redis.call('HSET', keys.ready, shard, mine)
local noted = redis.call('HLEN', keys.ready)
if noted < whole(shards) then return { 'READY', noted } end
local numbers, fields = {}, {} -- Lua passes 8,000 values to a call
for i = 1, math.min(whole(shards), MOST_SHARDS) do
  numbers[i] = digits(i - 1)
  fields[i] = 'shard:' .. numbers[i]
end
local staged, names = redis.call('HMGET', keys.ready, unpack(numbers)), redis.call('HMGET', keys.version, unpack(fields))
for i = 1, #numbers do
  if not staged[i] then return { 'READY', noted } end
end

-- Plan and shards are logged letter by letter as they are hashed, so that anyone can hash them again.
local text, parts = redis.call('HGET', keys.plan, 'text'), table.concat(staged, ',')
local plan = cjson.decode(text)
local new_head = redis.sha1hex(head .. '\n' .. text .. '\n' .. parts)
-- First, because a log takes no entry behind one with the highest id: no version is ever without its entry.
local commit_id = log_entry('commit', 'version', version, 'head', new_head, 'plan', text, 'shards', parts)
local function flip()
  local given_back, highest, before_rejected = end_rounds(plan.rejected, keys.skip, tonumber(furthest))
  pass_states_on(plan.rejected, before_rejected, version)
  local done, furthest_now, before_done = end_rounds(plan.contributions, keys.clock, highest)
  commit_states(plan.contributions, before_done, version)
  if rounds then -- what a version of units leaves out is left out for good, or its round would never be whole
    for _, unit in ipairs(given_back) do done[#done + 1] = unit end
    given_back = {}
  end
  for i = 1, #done, 1000 do redis.call('HDEL', keys.units, unpack(done, i, math.min(i + 999, #done))) end
  if #done > 0 then redis.call('HINCRBY', keys.units, 'done', #done) end
  for _, unit in ipairs(given_back) do free_unit(unit) end
  if ids then
    local taken = {}
    for id in ids:gmatch('%S+') do taken[#taken + 1] = id end
    for i = 1, #taken, 1000 do redis.call('XDEL', keys.inbox, unpack(taken, i, math.min(i + 999, #taken))) end
  else
    local ms, number = through:match('^(%d+)-(%d+)$')
    redis.call('XTRIM', keys.inbox, 'MINID', ms .. '-' .. digits(number + 1)) -- this plan takes the oldest entries
  end
  if of_term then end_trained(lots, prompts, next_version, version .. '.' .. unpack(staged):match('^(%S+)')) end
  redis.call('DEL', keys.plan, keys.ready)
  local changes = { 'version', version, 'head', new_head, 'furthest', digits(furthest_now),
    'contributions', digits(counted + #plan.contributions) }
  for i, part in ipairs(staged) do
    local place = #changes
    changes[place + 1], changes[place + 2] = 'before:' .. numbers[i], names[i] or ''
    changes[place + 3], changes[place + 4] = fields[i], version .. '.' .. part:match('^(%S+)')
  end
  -- A worker may also wait for a unit, or for its own commit: with a quorum, in ASP, and if no more of its contributions
  -- may wait than the bound allows.
  local after = lowest_round()
  if after ~= lowest or #given_back > 0 or rounds or closes == 'quorum' or bound < 0
    or tonumber(max_pending) <= bound then
    wake(after)
  end
  redis.call('HSET', keys.version, unpack(changes)) -- last: nothing fails behind it
end
local flipped, why = pcall(flip)
if flipped then return { 'FLIPPED', next_version, pinned(), commit_id } end
redis.call('XDEL', keys.commits, commit_id) -- the plan or a count is damaged
error(why, 0)
