-- staleness: the rule of a job. It says for all scripts what closes a version, how far a worker may run ahead, and from
-- which round one that joins goes on. (kvps.staleness, kvps.config)
-- USES numbers

-- Returns the rule, and then other fields of the config. The rule is:
-- closes  what closes a version: 'all' workers have pushed its round (BSP); a 'quorum' has come, and with a bound of 0
--         the others skip that round; all 'units' of its round are there; 'any' contribution, whatever round it is of
-- bound   how many rounds a worker may be ahead of the slowest, whose units are open too; below 0 there is no bound (ASP)
-- rounds  what makes rounds of units; nil where versions are not made of those:
--   per_round, per_epoch, total  how many units a round has, an epoch has, and there are
local function read_rule(...)
  local values = redis.call('HMGET', keys.config, 'staleness', 'quorum', 'units', ...)
  local staleness, quorum, units = unpack(values, 1, 3)
  local bound, closes, rounds = tonumber(staleness), 'any', nil
  if quorum ~= '0' then closes = 'quorum' elseif bound == 0 then closes = 'all' end
  if units ~= '0' and bound >= 0 then
    local per_round, per_epoch = unpack(redis.call('HMGET', keys.config, 'units_per_round', 'units_per_epoch'))
    local total = whole(units) or 0
    per_round, per_epoch = whole(per_round) or 0, whole(per_epoch) or 0
    if total > 0 and per_round > 0 then
      closes = 'units'
      rounds = { per_round = per_round, per_epoch = per_epoch > 0 and per_epoch or total, total = total }
    end
  end
  return closes, bound, rounds, unpack(values, 4)
end

-- Returns how many rounds versions have closed where each is one round of the job: what comes later goes into the next
-- one. An open plan has closed its round.
local function closed_rounds(version) return whole(version) + redis.call('EXISTS', keys.plan) end

-- Returns the round to which a worker that joins must have come; `furthest` is the highest committed round.
-- In BSP, the rounds that the others have made, including the open plan's, are closed, and it skips them. SSP closes no
-- round, but a worker may not come back further behind than the bound allows. Others never wait for it. Where a round is
-- of units, nobody skips one: a worker does as many of them as it can.
local function due_round(closes, bound, worker, version, furthest)
  if closes == 'units' or bound < 0 then return 0 end
  if bound == 0 then return closed_rounds(version) end
  local first, first_round, _, second_round = unpack(redis.call('ZRANGE', keys.rounds, 0, 1, 'WITHSCORES'))
  local others = first == worker and second_round or first ~= worker and first_round
  return tonumber(others or furthest) - bound - 1
end
