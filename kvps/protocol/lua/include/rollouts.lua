-- rollouts: items of experience, from the offer of an actor to their fate.
-- An item is named "<actor>.<incarnation>:<number>". A lot is what has one fate: the items of one prompt, or one item
-- where there are no prompts. It is whole with `group` items, and only whole lots are taken. Prompts are units: "free",
-- "a0 generates", or "whole". An actor that has ended has no entry.
-- Whoever may put items may have written any of it. What is damaged counts as nothing, so that a script which has begun
-- to write does not fail.
-- USES log names numbers time

-- Returns what the job's learner has set of them; nil for a job without. Fails here if that is damaged.
local function read_rollouts()
  local text = redis.call('HGET', keys.config, 'rollouts')
  if not text or text == '' then return nil end
  local s = #text < 4096 and cjson.decode(text)
  for _, name in ipairs({ 'staleness', 'units', 'group', 'capacity', 'nbytes' }) do
    local value = s and s[name]
    if type(value) ~= 'number' or not (value >= -1 and value < 9007199254740992) then
      error('rollouts of the job: ' .. name .. ' is no number')
    end
  end
  return s
end

-- Returns a count that a hash has; 0 for none.
local function counted(text) return whole(text or '0') or 0 end

-- Adds to a count.
local function add(key, field, by)
  local sum = redis.pcall('HINCRBY', key, field, digits(by))
  if type(sum) == 'number' then return sum end
  redis.call('HSET', key, field, digits(math.max(0, by))) -- it was no number
  return by
end

local function is_count(value)
  return type(value) == 'number' and value >= 0 and value < 9007199254740992 and value % 1 == 0
end

-- Returns the entry of an actor; nil if there is none.
local function read_entry_of(actor)
  local text = redis.call('HGET', keys.actors, actor)
  local read, entry = pcall(cjson.decode, text and #text < 65536 and text or '')
  if not read or type(entry) ~= 'table' then return nil end
  for _, value in pairs(entry) do -- it is written again, and JSON has neither NaN nor infinities
    local is = type(value)
    if is == 'table' or is == 'number' and not (math.abs(value) < 9007199254740992) then return nil end
  end
  local fits = is_count(entry.offered) and is_count(entry.last) and is_count(entry.items)
    and (not entry.offered_bytes or is_count(entry.offered_bytes)) and (not entry.unit or whole(entry.unit))
  return fits and type(entry.incarnation) == 'string' and #entry.incarnation <= 128 and entry or nil
end

-- Returns an actor's entry if this is its present incarnation; or nil, and the answer to it.
local function read_actor(actor, incarnation)
  local entry = read_entry_of(actor)
  if entry and entry.incarnation == incarnation then return entry end
  return nil, { 'EVICTED', entry and 'replaced' or 'unknown' }
end

-- Writes an actor's entry, and notes the sign of life. The first write is allowed when memory is full.
local function write_actor(actor, entry)
  redis.call('ZREM', keys.actor_beats, actor)
  redis.call('ZADD', keys.actor_beats, now_ms(), actor)
  redis.call('HSET', keys.actors, actor, cjson.encode(entry))
end

-- Gives the room back that an actor has reserved for an item.
local function drop_offer(entry)
  if not entry.offered_bytes then return end
  redis.call('HDEL', keys.rollouts, '') -- allowed when memory is full, and lets the script write
  add(keys.rollouts, 'offers', -1)
  add(keys.rollouts, 'offered_bytes', -entry.offered_bytes)
  entry.offered_bytes = nil
end

-- Ends an actor's incarnation. Its offer and its prompt are given back; what was accepted of it stays.
local function end_actor(actor, entry)
  redis.call('HDEL', keys.actors, actor)
  redis.call('ZREM', keys.actor_beats, actor)
  drop_offer(entry)
  if not entry.unit then return end
  redis.call('ZREM', keys.taken_units, entry.unit)
  redis.call('HSET', keys.units, entry.unit, 'free')
  redis.call('ZADD', keys.free_units, entry.unit, entry.unit)
end

-- Returns whether a text is the id of an item: an actor's name, an incarnation and a number.
local function is_id(text)
  local of, number = text:match('^([^:]+):(%d+)$')
  local from, _, count, nonce = (of or ''):find('%.(%d+)%-(%w+)$')
  return from and whole(number) and whole(count) and #nonce <= 32 and is_name(of:sub(1, from - 1))
end

-- Returns a lot: the order of its first item, its oldest base, and the ids of its items; nil if there is none. The ids
-- are put into the JSON of a plan as they are.
local function read_lot(lot)
  local text = redis.call('HGET', keys.lots, lot)
  if not text then return nil end
  local nothing, ids = { order = '0', base = 0, ids = {} }, {}
  if #text > 65536 or not text:find('^[ :NAME_CHARACTERS]+$') then return nothing end
  local order, base, rest = text:match('^(%d+) (%d+) (.+)$')
  if not whole(order) or not whole(base) then return nothing end
  for id in rest:gmatch('%S+') do
    if #ids == MOST_GROUP or not is_id(id) then return nothing end
    ids[#ids + 1] = id
  end
  return { order = order, base = whole(base), ids = ids }
end

-- Returns the lots that a plan names, at most as many as there may be items.
local function lots_in(text)
  local found = {}
  for lot in (text or ''):gmatch('%S+') do
    if #found == MOST_ITEMS then error('the plan of the job: too many lots') end
    found[#found + 1] = lot
  end
  return found
end

-- Returns the texts of a lot's items for the log: id, prompt or '-', and base.
local function texts_of(lot, found, prompts)
  local texts = {}
  for i, id in ipairs(found.ids) do
    local base = counted((redis.call('HGET', keys.items, id) or ''):match('^%d+'))
    texts[i] = id .. ' ' .. (prompts > 0 and whole(lot) and lot or '-') .. ' ' .. digits(base)
  end
  return texts
end

-- Deletes the items of a lot that has had its fate.
local function delete_lot(lot, found)
  local bytes = 0
  for _, id in ipairs(found.ids) do
    bytes = bytes + counted((redis.call('HGET', keys.items, id) or ''):match('^%d+ (%d+)'))
    redis.call('HDEL', keys.items, id)
  end
  redis.call('HDEL', keys.lots, lot)
  redis.call('HDEL', keys.rollouts, 'full')
  add(keys.rollouts, 'bytes', -bytes)
end

-- Ends a prompt for good. Nobody has one whose lot is whole.
local function close_prompt(lot)
  if not whole(lot) then return end
  redis.call('HDEL', keys.units, lot)
  add(keys.units, 'done', 1)
end

-- Gives a taken lot back: it waits again, where it was.
local function give_back(lot)
  redis.call('ZREM', keys.taken_lots, lot)
  local found = read_lot(lot)
  if not found then return end
  redis.call('ZADD', keys.waiting_lots, found.order, lot)
  redis.call('ZADD', keys.lot_bases, digits(found.base), lot)
end

local function log_fates(kind, version, texts, ...)
  if #texts == 0 then return end
  for i = 1, #texts, 500 do
    log_entry(kind, 'version', version, 'items', table.concat(texts, ',', i, math.min(i + 499, #texts)), ...)
  end
  add(keys.rollouts, kind, #texts)
end

-- Drops lots that are too stale for the version behind this one. Returns whether it has dropped some, and whether there
-- may be more: one call drops only so many.
local function drop_stale(s, version)
  if s.staleness < 0 then return false, false end
  local texts, more = {}, false
  local stale = redis.call('ZRANGEBYSCORE', keys.lot_bases, '-inf',
    '(' .. digits(math.max(0, whole(version) - s.staleness)), 'LIMIT', 0, MOST_TAKEN)
  for _, lot in ipairs(stale) do
    if #texts >= MOST_TAKEN then
      more = true
      break
    end
    local found = read_lot(lot) or { ids = {} }
    for _, text in ipairs(texts_of(lot, found, s.units)) do texts[#texts + 1] = text end
    delete_lot(lot, found)
    redis.call('ZREM', keys.lot_bases, lot)
    local whole_one = redis.call('ZREM', keys.waiting_lots, lot) == 1
    if s.again and whole_one and s.units > 0 and whole(lot) then
      redis.call('HSET', keys.units, lot, 'free')
      redis.call('ZADD', keys.free_units, lot, lot)
    elseif s.units > 0 and not s.again then -- also for who generates on it
      local actor = (redis.call('HGET', keys.units, lot) or ''):match('^(%S+) generates$')
      local entry = actor and read_entry_of(actor) or {}
      if entry.unit == lot then
        entry.unit = nil
        redis.call('HSET', keys.actors, actor, cjson.encode(entry))
      end
      redis.call('ZREM', keys.free_units, lot)
      redis.call('ZREM', keys.taken_units, lot)
      close_prompt(lot)
    end
  end
  log_fates('stale', version, texts, 'then', s.units > 0 and s.again and 'again' or 'drop')
  return #stale > 0, more or #stale == MOST_TAKEN
end

-- Returns the first of some lots that the term of a plan has not taken, '' if it is not the one that takes items; or nil.
local function first_untaken(lots, term)
  if #lots > 0 and redis.call('HGET', keys.rollouts, 'claimed') ~= term then return '' end
  for _, lot in ipairs(lots) do
    if not redis.call('ZSCORE', keys.taken_lots, lot) then return lot end
  end
end

-- Ends lots that a new version is trained on, and notes the name of that version.
local function end_trained(lots, prompts, version, name)
  for _, lot in ipairs(lots) do
    local found = read_lot(lot) or { ids = {} }
    delete_lot(lot, found)
    redis.call('ZREM', keys.taken_lots, lot)
    add(keys.rollouts, 'trained', #found.ids)
    if prompts > 0 then close_prompt(lot) end
  end
  redis.call('HDEL', keys.bases, digits(version - MOST_BASES))
  redis.call('HSET', keys.bases, digits(version), name)
end

-- Ends the incarnations of actors that were silent for long. If nobody has looked for long, Redis or the network may
-- have been away, and all get a new start; a time in the future counts as now. Returns whether one has ended.
local function end_silent()
  local timeout_ms, now = whole(redis.call('HGET', keys.config, 'worker_timeout_ms')), now_ms()
  local last_look = tonumber(redis.call('ZSCORE', keys.actor_beats, '') or '0')
  local away = now - last_look > timeout_ms / 2
  redis.call('ZREM', keys.actor_beats, '')
  local new_start = redis.call('ZRANGEBYSCORE', keys.actor_beats, away and '-inf' or '(' .. digits(now), '+inf',
    'LIMIT', 0, MOST_IDS)
  for _, actor in ipairs(new_start) do redis.call('ZADD', keys.actor_beats, now, actor) end
  local silent = redis.call('ZRANGEBYSCORE', keys.actor_beats, '-inf', '(' .. digits(now - timeout_ms),
    'LIMIT', 0, MOST_IDS)
  for _, actor in ipairs(silent) do
    local entry = read_entry_of(actor) or {}
    end_actor(actor, entry)
    if is_name(actor) then log_entry('gone', 'actor', actor, 'incarnation', entry.incarnation or '', 'reason',
      string.format('no sign of life for %.1f s', timeout_ms / 1000)) end
  end
  redis.call('ZADD', keys.actor_beats, now, '')
  return #silent > 0
end

-- A learner numbers its calls within a term, or a late copy would take or settle other items. A take that finds nothing
-- uses no number: so the number of another kind of call may come to be that of a late copy. Returns what answers a copy,
-- nil for the next call.
local function earlier_call(kind, term, number)
  local claimed, last, call, took = unpack(redis.call('HMGET', keys.rollouts, 'claimed', 'number', 'call', 'took'))
  if claimed ~= term then return { 'TERM', claimed or '' } end
  if whole(number) < counted(last) then return { 'PAST' } end
  if number == last then return call == kind and { 'OK', took } or { 'PAST' } end
end

local function note_call(kind, number, took)
  redis.call('HSET', keys.rollouts, 'number', number, 'call', kind, 'took', took)
end

-- Writes the items that a checkpoint has. All lots of them wait; prompts with a whole lot are not free.
local function restore_items(earlier)
  for field, value in pairs(earlier.counters or {}) do redis.call('HSET', keys.rollouts, field, value) end
  for id, record in pairs(earlier.items or {}) do redis.call('HSET', keys.items, id, record) end
  local s = next(earlier.lots or {}) and read_rollouts()
  for lot, text in pairs(earlier.lots or {}) do
    redis.call('HSET', keys.lots, lot, text)
    local found = read_lot(lot)
    redis.call('ZADD', keys.lot_bases, digits(found.base), lot)
    if s.units == 0 or #found.ids >= s.group then
      redis.call('ZADD', keys.waiting_lots, found.order, lot)
      if s.units > 0 then redis.call('HSET', keys.units, lot, 'whole') end
    end
  end
end
