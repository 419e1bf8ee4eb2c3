-- take: drop the lots that are too stale for the next version, then take whole ones. Actors that are silent for long end.
-- KEYS version:hash config:hash term(shard):string rollouts:hash items:hash lots:hash waiting_lots:zset lot_bases:zset
-- KEYS taken_lots:zset actors:hash actor_beats:zset units:hash free_units:zset taken_units:zset turns:stream commits:stream
-- KEYS never
-- ARGV job term number most least order
--   number: of this call within the term
--   most, least: how many lots; with fewer than `least` nothing is taken, as long as more may come
--   order: oldest, newest or random
-- USES job numbers rollouts run_control turns
-- Returns {OK, lots} also when repeated: one text | {MORE}: so many are too stale that one call does not drop all of them
--     | {EMPTY, lots that wait, items} | {HELD, lots taken, items}: no more can
--     come before these have their fate | {DONE, 0, items}: no more can come
--     | {STOPPED, run, by, reason, at}: and no lot waits | {PAST} | {NONE} | {TERM, term} | {NOJOB} | {ANOTHER} | {RESTARTED}
--     | {WRONGTYPE, key, is, want}
local refused, version, run = read_job(job, 'version', 'run')
if refused then return refused end
local present_term = redis.call('GET', keys.term) or ''
if present_term ~= term then return { 'TERM', present_term } end
local s = read_rollouts()
if not s then return { 'NONE' } end
local again = earlier_call('take', term, number)
if again then return again end

redis.call('HDEL', keys.rollouts, '') -- allowed when memory is full, and lets the script write
local ended = end_silent()
local dropped, more = drop_stale(s, version)
if ended or dropped then wake('') end
if more then return { 'MORE' } end

local waiting, items = redis.call('ZCARD', keys.waiting_lots), redis.call('HLEN', keys.items)
local held, full, offers = redis.call('ZCARD', keys.taken_lots), unpack(redis.call('HMGET', keys.rollouts, 'full', 'offers'))
redis.call('HDEL', keys.rollouts, 'full')
-- Whether an item may come that makes another lot whole: there are prompts, and there is room, also for the bytes of an
-- item that was offered. If no lot is whole, groups get room beyond that.
local function more_may_come()
  if run and run ~= 'pause' then return false end
  if s.units > 0 then
    local next_one, done = unpack(redis.call('HMGET', keys.units, 'next', 'done'))
    local open = counted(next_one) - counted(done) - waiting - held
    if open == 0 and counted(next_one) >= s.units then return false end
  end
  return counted(offers) > 0 or waiting + held == 0 or (not full and items < s.capacity)
end
if waiting == 0 or waiting < whole(least) then
  if more_may_come() then
    -- Actors look how far ahead they are: these too go into the next version, beside what is held for it.
    redis.call('HSET', keys.rollouts, 'batch', digits(held + whole(most)))
    return { 'EMPTY', waiting, items }
  end
  if waiting == 0 then
    if run and run ~= 'pause' then return run_answer('STOPPED') end
    return { held > 0 and 'HELD' or s.units > 0 and 'DONE' or 'EMPTY', held, items }
  end
end
local taken
local count = math.min(math.max(1, whole(most)), MOST_TAKEN, math.max(1, math.floor(s.capacity / math.max(1, s.group))))
if order == 'newest' then
  taken = redis.call('ZREVRANGE', keys.waiting_lots, 0, count - 1)
elseif order == 'random' then
  taken = redis.call('ZRANDMEMBER', keys.waiting_lots, count)
else
  taken = redis.call('ZRANGE', keys.waiting_lots, 0, count - 1)
end
local there = {}
for _, lot in ipairs(taken) do
  local place = redis.call('ZSCORE', keys.waiting_lots, lot)
  redis.call('ZREM', keys.waiting_lots, lot)
  redis.call('ZREM', keys.lot_bases, lot)
  if redis.call('HEXISTS', keys.lots, lot) == 1 then
    redis.call('ZADD', keys.taken_lots, place, lot)
    there[#there + 1] = lot
  end
end
if #there == 0 then return { 'MORE' } end -- somebody else has put these there
local took = table.concat(there, ' ')
note_call('take', number, took)
redis.call('HSET', keys.rollouts, 'batch', most)
return { 'OK', took }
