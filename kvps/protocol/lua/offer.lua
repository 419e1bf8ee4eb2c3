-- offer: reserve room for an item, before its bytes are sent, in place of what this incarnation has offered and not put.
-- KEYS version:hash config:hash rollouts:hash items:hash lots:hash waiting_lots:zset taken_lots:zset actors:hash
-- KEYS actor_beats:zset taken_units:zset news:stream never
-- ARGV job actor incarnation seq nbytes
--   seq: counted from 1 in each incarnation
-- USES job numbers rollouts
-- Returns {OK} also when repeated | {FULL, items, bytes}: these are there or offered | {CLOSED}: it has no prompt
--     | {PAST}: a later one was offered | {NONE} | {EVICTED, state} | {NOJOB} | {ANOTHER} | {RESTARTED}
--     | {WRONGTYPE, key, is, want}
local refused = read_job(job)
if refused then return refused end
local s = read_rollouts()
if not s then return { 'NONE' } end
local entry, gone = read_actor(actor, incarnation)
if not entry then return gone end
local number, size = whole(seq), whole(nbytes)
if number == entry.offered and entry.offered_bytes then return { 'OK' } end
if number <= entry.offered then return { 'PAST' } end
if s.units > 0 and not entry.unit then return { 'CLOSED' } end

local offers, offered, bytes = unpack(redis.call('HMGET', keys.rollouts, 'offers', 'offered_bytes', 'bytes'))
local mine = entry.offered_bytes
local items = redis.call('HLEN', keys.items) + counted(offers) - (mine and 1 or 0)
local held = counted(bytes) + counted(offered) - (mine or 0)

-- Groups may fill all room and none of them be whole. Then the lowest prompt that somebody has gets room beyond it, as
-- long as no lot is whole and no offer that is out makes one whole; else nobody could ever go on.
local function may_exceed()
  if s.units == 0 or s.group == 1 then return false end
  if redis.call('ZCARD', keys.waiting_lots) > 0 or redis.call('ZCARD', keys.taken_lots) > 0 then return false end
  if unpack(redis.call('ZRANGE', keys.taken_units, 0, 0)) ~= entry.unit then return false end
  if redis.call('HLEN', keys.actors) > MOST_IDS then return false end
  for _, name in ipairs(redis.call('HKEYS', keys.actors)) do
    local other = name ~= actor and read_entry_of(name) or {}
    local lot = other.offered_bytes and other.unit and read_lot(other.unit)
    if lot and #lot.ids + 1 >= s.group then return false end
  end
  return true
end
redis.call('HDEL', keys.rollouts, '') -- allowed when memory is full, and lets the script write
if (items >= s.capacity or held + size > s.nbytes) and not may_exceed() then
  -- A learner that waits for more takes what there is.
  if redis.call('HSETNX', keys.rollouts, 'full', 1) == 1 then
    redis.pcall('XADD', keys.news, 'MAXLEN', '~', 100, '*', 'lot', '')
  end
  return { 'FULL', items, held }
end
drop_offer(entry)
entry.offered, entry.offered_bytes = number, size
add(keys.rollouts, 'offers', 1)
add(keys.rollouts, 'offered_bytes', size)
write_actor(actor, entry)
return { 'OK' }
