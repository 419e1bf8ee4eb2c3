-- turns: wakes the workers that wait for their turn. They wait on this small stream and not on the log: there, every join
-- would wake each of 1,000 workers, and each would read the entry of every commit.
local function lowest_round()
  local _, round = unpack(redis.call('ZRANGE', keys.rounds, 0, 0, 'WITHSCORES'))
  return round
end

-- A worker may have given the stream an entry with the highest id, so that it takes no other. Then nobody is woken, and
-- each looks again within a second.
local function wake(lowest) redis.pcall('XADD', keys.turns, 'MAXLEN', '~', 100, '*', 'lowest', lowest or '') end
