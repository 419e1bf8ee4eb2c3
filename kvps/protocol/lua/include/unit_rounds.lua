-- unit_rounds: which units of data make a round, where versions are made of rounds of units. An epoch begins with a whole
-- round, and its last round may be shorter.
-- USES numbers replies

-- Returns how many units a round has, how many an epoch has, how many there are, and the bound; nil where versions are
-- not made of rounds of units.
local function unit_rounds()
  local per_round, per_epoch, total, staleness = unpack(redis.call('HMGET', keys.config,
    'units_per_round', 'units_per_epoch', 'units', 'staleness'))
  per_round, total = whole(per_round) or 0, whole(total) or 0
  if per_round == 0 or total == 0 or tonumber(staleness) < 0 then return nil end
  per_epoch = whole(per_epoch) or 0
  return per_round, per_epoch > 0 and per_epoch or total, total, tonumber(staleness)
end

-- Returns the first unit of a round, and the first one behind it. Rounds and units are counted from 0.
local function units_of(round, per_round, per_epoch, total)
  local rounds = math.ceil(per_epoch / per_round)
  local epoch, within = math.floor(round / rounds), round % rounds
  local first = epoch * per_epoch + within * per_round
  return math.min(first, total), math.min(first + per_round, (epoch + 1) * per_epoch, total)
end

-- Returns the round of a unit.
local function round_of(unit, per_round, per_epoch)
  local epoch, within = math.floor(unit / per_epoch), unit % per_epoch
  return epoch * math.ceil(per_epoch / per_round) + math.floor(within / per_round)
end

-- Returns the contributions of a round in the order of its units, and the ids of their entries in the inbox in that of
-- the inbox; two empty lists while one is missing.
local function whole_round(round, per_round, per_epoch, total)
  local first, behind = units_of(round, per_round, per_epoch, total)
  local contributions, ids = {}, {}
  if redis.call('XLEN', keys.inbox) < behind - first then return {}, {} end
  for _, entry in ipairs(redis.call('XRANGE', keys.inbox, '-', '+')) do
    local id, fields = read_entry(entry)
    local unit = tonumber(fields.unit or '-1')
    if unit >= first and unit < behind then contributions[unit - first + 1], ids[#ids + 1] = fields.contribution, id end
  end
  if #ids < behind - first then return {}, {} end
  return contributions, ids
end

-- Returns 1 if a unit of an open round may be handed out at once, else 0.
local function more_units(version)
  local per_round, per_epoch, total, bound = unit_rounds()
  if not per_round then return 1 end
  local _, behind = units_of(version + bound, per_round, per_epoch, total)
  local handed_out = tonumber(redis.call('HGET', keys.units, 'next') or '0')
  return (handed_out < behind or redis.call('ZCARD', keys.free_units) > 0) and 1 or 0
end
