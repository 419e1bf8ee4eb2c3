-- claim: make a term of shard 0 the one that takes items. What earlier terms, or this one, have taken waits again, except
-- what the caller names and is still there. Actors that are silent for long end.
-- KEYS version:hash config:hash term(shard):string rollouts:hash lots:hash waiting_lots:zset lot_bases:zset
-- KEYS taken_lots:zset actors:hash actor_beats:zset bases:hash units:hash free_units:zset taken_units:zset turns:stream
-- KEYS commits:stream never
-- ARGV job term number lots...
--   number: of this call within the term, counted from 1
--   lots: what the caller holds: each lot, and the ids of its items
-- USES job numbers rollouts turns
-- Returns {OK, lots}: the caller's from now on, one text, also when repeated | {PAST}: a later call has come
--     | {NONE} | {TERM, term} | {NOJOB} | {ANOTHER} | {RESTARTED} | {WRONGTYPE, key, is, want}
local refused, version, name = read_job(job, 'version', 'shard:0')
if refused then return refused end
local present_term = redis.call('GET', keys.term) or ''
if present_term ~= term then return { 'TERM', present_term } end
local s = read_rollouts()
if not s then return { 'NONE' } end
local again = redis.call('HGET', keys.rollouts, 'claimed') == term and earlier_call('claim', term, number)
if again then return again end

redis.call('HDEL', keys.rollouts, '') -- allowed when memory is full, and lets the script write
-- After a loss the server has other versions of these numbers. A job that was restored begins with its first one.
local newest = whole(version)
if redis.call('HLEN', keys.bases) > 2 * MOST_BASES then redis.call('UNLINK', keys.bases) end -- no job has so many
for _, each in ipairs(redis.call('HKEYS', keys.bases)) do
  if (whole(each) or newest) >= newest then redis.call('HDEL', keys.bases, each) end
end
redis.call('HSET', keys.bases, version, name)
local keeps, kept = {}, {}
for _, text in ipairs(lots) do
  local lot, ids = text:match('^(%S+) (.+)$')
  local found = lot and read_lot(lot)
  local same = found and table.concat(found.ids, ' ') == ids -- after a loss it may be another one
  local place = same and (redis.call('ZSCORE', keys.taken_lots, lot) or redis.call('ZSCORE', keys.waiting_lots, lot))
  if place then
    keeps[lot], kept[#kept + 1] = true, lot
    redis.call('ZREM', keys.waiting_lots, lot)
    redis.call('ZREM', keys.lot_bases, lot)
    redis.call('ZADD', keys.taken_lots, place, lot)
  end
end
local most = math.min(MOST_ITEMS, math.floor(s.capacity) + MOST_GROUP) -- no learner takes more
for _, lot in ipairs(redis.call('ZRANGE', keys.taken_lots, 0, most)) do
  if not keeps[lot] then give_back(lot) end
end
local took = table.concat(kept, ' ')
redis.call('HSET', keys.rollouts, 'claimed', term)
note_call('claim', number, took)
end_silent()
wake('')
return { 'OK', took }
