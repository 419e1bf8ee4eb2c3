-- rollouts: items of experience, from the offer of an actor to their fate.
-- An item is named "<actor>.<incarnation>:<number>". A lot is what has one fate: the items of one prompt, or one item
-- where there are no prompts. It is whole with `group` items, and only whole lots are taken. Prompts are units: "free",
-- "a0 generates", or "whole". An actor that has ended has no entry.
-- USES log numbers time turns

-- Returns what the job's learner has set of them; nil for a job without.
local function read_rollouts()
  local text = redis.call('HGET', keys.config, 'rollouts')
  return text and text ~= '' and cjson.decode(text) or nil
end

-- Returns an actor's entry if this is its present incarnation; or nil, and the answer to it.
local function read_actor(actor, incarnation)
  local text = redis.call('HGET', keys.actors, actor)
  local entry = text and cjson.decode(text)
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
  redis.call('HINCRBY', keys.rollouts, 'offers', -1)
  redis.call('HINCRBY', keys.rollouts, 'offered_bytes', digits(-entry.offered_bytes))
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

-- Returns a lot: the order of its first item, its oldest base, and the ids of its items; nil if there is none.
local function read_lot(lot)
  local text = redis.call('HGET', keys.lots, lot)
  if not text or #text > 65536 then return nil end
  local order, base, rest = text:match('^(%d+) (%d+) (.+)$')
  local ids = {}
  for id in (rest or ''):gmatch('%S+') do ids[#ids + 1] = id end
  return { order = order, base = tonumber(base), ids = ids }
end

-- Returns the texts of a lot's items for the log: id, prompt or '-', and base.
local function texts_of(lot, found, prompts)
  local texts = {}
  for i, id in ipairs(found.ids) do
    local base = (redis.call('HGET', keys.items, id) or ''):match('^%d+') or '0'
    texts[i] = id .. ' ' .. (prompts > 0 and lot or '-') .. ' ' .. base
  end
  return texts
end

-- Deletes the items of a lot that has had its fate.
local function delete_lot(lot, found)
  local bytes = 0
  for _, id in ipairs(found.ids) do
    bytes = bytes + (tonumber((redis.call('HGET', keys.items, id) or ''):match('^%d+ (%d+)')) or 0)
    redis.call('HDEL', keys.items, id)
  end
  redis.call('HDEL', keys.lots, lot)
  redis.call('HDEL', keys.rollouts, 'full')
  redis.call('HINCRBY', keys.rollouts, 'bytes', digits(-bytes))
end

-- Ends a prompt for good. Nobody has one whose lot is whole.
local function close_prompt(lot)
  redis.call('HDEL', keys.units, lot)
  redis.call('HINCRBY', keys.units, 'done', 1)
end

-- Gives a taken lot back: it waits again, where it was.
local function give_back(lot)
  redis.call('SREM', keys.taken_lots, lot)
  local found = read_lot(lot)
  if not found then return end
  redis.call('ZADD', keys.waiting_lots, found.order, lot)
  redis.call('ZADD', keys.lot_bases, digits(found.base), lot)
end

local function log_fates(kind, version, texts, ...)
  for i = 1, #texts, 500 do
    log_entry(kind, 'version', version, 'items', table.concat(texts, ',', i, math.min(i + 499, #texts)), ...)
  end
  redis.call('HINCRBY', keys.rollouts, kind, #texts)
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
    local text = redis.call('HGET', keys.actors, actor)
    local entry = text and cjson.decode(text) or {}
    end_actor(actor, entry)
    log_entry('gone', 'actor', actor, 'incarnation', entry.incarnation or '', 'reason',
      string.format('no sign of life for %.1f s', timeout_ms / 1000))
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
  if whole(number) < whole(last) then return { 'PAST' } end
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
