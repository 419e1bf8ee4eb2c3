-- put: accept an item whose bytes are stored and whose room is reserved.
-- KEYS version:hash config:hash rollouts:hash items:hash lots:hash waiting_lots:zset lot_bases:zset actors:hash
-- KEYS actor_beats:zset bases:hash units:hash taken_units:zset news:stream never
-- ARGV job actor incarnation seq unit base name nbytes chunks digest form
--   unit: the prompt, '' for none
--   base, name: the oldest version that it was made on, and the staged name of that version
--   chunks: how many keys its bytes are in
--   digest: of its bytes
--   form: what items of one job have in common, one word
-- USES job numbers rollouts
-- Returns {OK, id} also when repeated | {CLOSED}: the actor has not this prompt (any more) | {STALE}: names of so old
--     versions are not kept | {BASE}: no such version is there | {OFFER}: no room is reserved for so much | {FORM, form}:
--     other items have this one | {BAD} | {NONE} | {EVICTED, state} | {NOJOB} | {ANOTHER} | {RESTARTED}
--     | {WRONGTYPE, key, is, want}
local refused, committed = read_job(job, 'version')
if refused then return refused end
local s = read_rollouts()
if not s then return { 'NONE' } end
local entry, gone = read_actor(actor, incarnation)
if not entry then return gone end
local number, size, version = whole(seq), whole(nbytes), whole(base)
local id = actor .. '.' .. incarnation .. ':' .. digits(number)
if number <= entry.last then return { 'OK', id } end
if not whole(chunks) or not version or #digest > 64 or #form > 4096 or not (digest .. form):find('^[!-~]+$') then
  return { 'BAD' }
end
local function give_room_back(answer)
  drop_offer(entry)
  write_actor(actor, entry)
  return { answer }
end
if (entry.unit or '') ~= unit then return give_room_back('CLOSED') end
local known = redis.call('HGET', keys.bases, base)
if not known and version <= whole(committed) - MOST_BASES then return give_room_back('STALE') end
if number ~= entry.offered or size ~= entry.offered_bytes then return { 'OFFER' } end
if known ~= name then return { 'BASE' } end
local common = redis.call('HGET', keys.rollouts, 'form')
if common and common ~= form then return { 'FORM', common } end

redis.call('HDEL', keys.items, id) -- allowed when memory is full, and lets the script write: the bytes are there
if not common then redis.call('HSET', keys.rollouts, 'form', form) end
redis.call('HSET', keys.items, id, table.concat({ base, nbytes, chunks, digest, unit == '' and '-' or unit }, ' '))
add(keys.rollouts, 'bytes', size)
local lot = unit ~= '' and unit or id
local found = read_lot(lot) or { order = digits(add(keys.rollouts, 'orders', 1)), base = version, ids = {} }
found.base, found.ids[#found.ids + 1] = math.min(found.base, version), id
redis.call('HSET', keys.lots, lot, found.order .. ' ' .. digits(found.base) .. ' ' .. table.concat(found.ids, ' '))
redis.call('ZADD', keys.lot_bases, digits(found.base), lot)
drop_offer(entry)
entry.last, entry.items, entry.version = number, entry.items + 1, version
if unit == '' or #found.ids >= s.group then
  redis.call('ZADD', keys.waiting_lots, found.order, lot)
  if unit ~= '' then
    entry.unit = nil
    redis.call('ZREM', keys.taken_units, unit)
    redis.call('HSET', keys.units, unit, 'whole')
  end
  redis.pcall('XADD', keys.news, 'MAXLEN', '~', 100, '*', 'lot', lot) -- an actor may have given it the highest id
end
write_actor(actor, entry)
return { 'OK', id }
