-- take: drop the lots that are too stale for the next version, then take whole ones. Actors that are silent for long end.
-- KEYS version:hash config:hash term(shard):string rollouts:hash items:hash lots:hash waiting_lots:zset lot_bases:zset
-- KEYS taken_lots:set actors:hash actor_beats:zset units:hash free_units:zset taken_units:zset turns:stream commits:stream
-- KEYS never
-- ARGV job shard term number most least order
--   number: of this call within the term
--   most, least: how many lots; with fewer than `least` nothing is taken, as long as more may come
--   order: oldest, newest or random
-- USES job log numbers rollouts run_control time turns
-- Returns {OK, lots} also when repeated: one text | {EMPTY, lots that wait, items} | {HELD, lots taken, items}: no more can
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

redis.call('HDEL', keys.rollouts, 'took') -- allowed when memory is full, and lets the script write
local changed = end_silent()
if s.staleness >= 0 then
  local texts = {}
  local stale = redis.call('ZRANGEBYSCORE', keys.lot_bases, '-inf', '(' .. digits(math.max(0, whole(version) - s.staleness)),
    'LIMIT', 0, MOST_ITEMS)
  for _, lot in ipairs(stale) do
    local found = read_lot(lot) or { ids = {} }
    for _, text in ipairs(texts_of(lot, found, s.units)) do texts[#texts + 1] = text end
    delete_lot(lot, found)
    redis.call('ZREM', keys.lot_bases, lot)
    local whole_one = redis.call('ZREM', keys.waiting_lots, lot) == 1
    if s.units > 0 then
      local actor = (redis.call('HGET', keys.units, lot) or ''):match('^(%S+) generates$')
      if s.again and whole_one then
        redis.call('HSET', keys.units, lot, 'free')
        redis.call('ZADD', keys.free_units, lot, lot)
      elseif not s.again then -- also for who generates on it
        local held = actor and redis.call('HGET', keys.actors, actor)
        local entry = held and cjson.decode(held) or {}
        if entry.unit == lot then
          entry.unit = nil
          redis.call('HSET', keys.actors, actor, cjson.encode(entry))
        end
        redis.call('ZREM', keys.free_units, lot)
        redis.call('ZREM', keys.taken_units, lot)
        close_prompt(lot)
      end
    end
  end
  log_fates('stale', version, texts, 'then', s.units > 0 and s.again and 'again' or 'drop')
  changed = changed or #stale > 0
end
if changed then wake('') end

local waiting, items = redis.call('ZCARD', keys.waiting_lots), redis.call('HLEN', keys.items)
local held, full, offers = redis.call('SCARD', keys.taken_lots), unpack(redis.call('HMGET', keys.rollouts, 'full', 'offers'))
redis.call('HDEL', keys.rollouts, 'full')
-- Whether an item may come that makes another lot whole: there are prompts, and there is room, also for the bytes of an
-- item that was offered. If no lot is whole, groups get room beyond that.
local function more_may_come()
  if run and run ~= 'pause' then return false end
  if s.units > 0 then
    local next_one, done = unpack(redis.call('HMGET', keys.units, 'next', 'done'))
    local open = whole(next_one or '0') - whole(done or '0') - waiting - held
    if open == 0 and whole(next_one or '0') >= s.units then return false end
  end
  local coming = tonumber(offers or '0')
  return coming > 0 or waiting + held == 0 or (not full and items < s.capacity)
end
if waiting == 0 or waiting < whole(least) then
  if more_may_come() then return { 'EMPTY', waiting, items } end
  if waiting == 0 then
    if run and run ~= 'pause' then return run_answer('STOPPED') end
    return { held > 0 and 'HELD' or s.units > 0 and 'DONE' or 'EMPTY', held, items }
  end
end
local taken
local count = math.min(whole(most), MOST_TAKEN)
if order == 'newest' then
  taken = redis.call('ZREVRANGE', keys.waiting_lots, 0, count - 1)
elseif order == 'random' then
  taken = redis.call('ZRANDMEMBER', keys.waiting_lots, count)
else
  taken = redis.call('ZRANGE', keys.waiting_lots, 0, count - 1)
end
for _, lot in ipairs(taken) do
  redis.call('ZREM', keys.waiting_lots, lot)
  redis.call('ZREM', keys.lot_bases, lot)
  redis.call('SADD', keys.taken_lots, lot)
end
local took = table.concat(taken, ' ')
note_call('take', number, took)
redis.call('HSET', keys.rollouts, 'batch', most)
return { 'OK', took }
