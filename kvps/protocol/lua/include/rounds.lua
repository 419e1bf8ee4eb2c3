-- rounds: ends the rounds of a plan's contributions. A commit of 1,000 has some commands for all workers instead of
-- some for each, as it keeps the server from others.
-- USES numbers plans

-- Ends the round of each contribution, and counts it in a hash: the clock, or skip if it was rejected. A worker that
-- was draining, and whose last round this was, is gone. Returns the units; the highest round, or `furthest` if that is
-- higher; and the last round of each worker before these.
local function end_rounds(contributions, hash, furthest)
  local workers, ended, units, done = {}, {}, {}, {}
  for _, contribution in ipairs(contributions) do
    local worker, unit = author_and_unit(contribution)
    if not ended[worker] then workers[#workers + 1] = worker end
    ended[worker] = (ended[worker] or 0) + 1
    if unit ~= '-' then units[#units + 1] = unit end
  end
  for first = 1, #workers, 1000 do -- Lua passes some 8,000 values to a call
    local last = math.min(first + 999, #workers)
    local counts = redis.call('HMGET', hash, unpack(workers, first, last))
    local rounds = redis.call('ZMSCORE', keys.rounds, unpack(workers, first, last))
    local drained = redis.call('ZMSCORE', keys.draining, unpack(workers, first, last))
    local new_counts, new_rounds, gone = {}, {}, {}
    for i = 1, #counts do
      local worker = workers[first + i - 1]
      done[worker] = tonumber(rounds[i] or '0')
      local round = done[worker] + ended[worker]
      new_counts[2 * i - 1], new_counts[2 * i] = worker, digits(tonumber(counts[i] or '0') + ended[worker])
      new_rounds[2 * i - 1], new_rounds[2 * i] = round, worker
      if drained[i] and round >= tonumber(drained[i]) then gone[#gone + 1] = worker end
      furthest = math.max(furthest, round)
    end
    redis.call('HSET', hash, unpack(new_counts))
    redis.call('ZADD', keys.rounds, unpack(new_rounds))
    if #gone > 0 then
      redis.call('ZREM', keys.rounds, unpack(gone))
      redis.call('ZREM', keys.draining, unpack(gone))
    end
  end
  return units, furthest, done
end
