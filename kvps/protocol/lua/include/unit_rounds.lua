-- unit_rounds: which units of data make a round, where versions are made of rounds of units. An epoch begins with a whole
-- round, and its last round may be shorter.
-- `rounds` is what `read_rule` says of them.
-- USES replies

-- Returns the first unit of a round, and the first one behind it. Rounds and units are counted from 0.
local function units_of(rounds, round)
  local in_epoch = math.ceil(rounds.per_epoch / rounds.per_round)
  local epoch, within = math.floor(round / in_epoch), round % in_epoch
  local first = epoch * rounds.per_epoch + within * rounds.per_round
  return math.min(first, rounds.total), math.min(first + rounds.per_round, (epoch + 1) * rounds.per_epoch, rounds.total)
end

-- Returns the first unit that may not be handed out yet.
local function first_closed_unit(rounds, bound, version)
  local _, behind = units_of(rounds, version + bound)
  return behind
end

-- Returns the round of a unit.
local function round_of(rounds, unit)
  local epoch, within = math.floor(unit / rounds.per_epoch), unit % rounds.per_epoch
  return epoch * math.ceil(rounds.per_epoch / rounds.per_round) + math.floor(within / rounds.per_round)
end

-- Returns the contributions of a round in the order of its units, and the ids of their entries in the inbox in that of
-- the inbox; two empty lists while one is missing.
local function whole_round(rounds, round)
  local first, behind = units_of(rounds, round)
  local contributions, ids = {}, {}
  if redis.call('XLEN', keys.inbox) < behind - first then return {}, {} end
  for _, entry in ipairs(redis.call('XRANGE', keys.inbox, '-', '+', 'COUNT', MOST_OPEN_UNITS)) do
    local id, fields = read_entry(entry)
    local unit = tonumber(fields.unit or '-1')
    if unit >= first and unit < behind then contributions[unit - first + 1], ids[#ids + 1] = fields.contribution, id end
  end
  if #ids < behind - first then return {}, {} end
  return contributions, ids
end

-- Returns whether a unit of an open round may be handed out at once.
local function more_units(rounds, bound, version)
  local handed_out = tonumber(redis.call('HGET', keys.units, 'next') or '0')
  return handed_out < first_closed_unit(rounds, bound, version) or redis.call('ZCARD', keys.free_units) > 0
end
