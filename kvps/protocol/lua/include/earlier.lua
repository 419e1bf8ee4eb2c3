-- earlier: how a job goes on from an earlier version, which a checkpoint holds or `mirror` has noted.
-- USES workers

-- Writes the hashes of the job at that version. Ranks and clocks stay, nothing is pending, and units that were handed
-- out and not committed are free. A worker is to join again, and `comes(worker, entry)` is called, if it was at work, or
-- had left with contributions that were not committed; and if it was out of the clock with its work undone, where `back`
-- has its state.
local function restore_hashes(earlier, back, comes)
  local function restore(key, hash)
    for field, value in pairs(hash or {}) do redis.call('HSET', key, field, value) end
  end
  restore(keys.clock, earlier.clock)
  restore(keys.skip, earlier.skip)
  restore(keys.states, earlier.states)
  for worker, text in pairs(earlier.workers) do
    local entry = cjson.decode(text)
    local round = tonumber(earlier.clock[worker] or '0') + tonumber(earlier.skip[worker] or '0')
    local gone = entry.state == 'evicted' or (entry.state == 'left' and entry.round == round)
    if not gone or (back[entry.state] and not entry.finished) then
      entry.state, entry.finished = 'rejoining', false
      comes(worker, entry)
    end
    entry.round, entry.accepted = round, 0
    entry.unit, entry.residual = nil, nil -- the residual's bytes belong to another job, or to another clock
    write_worker(worker, entry)
  end
  for unit, state in pairs(earlier.units) do
    redis.call('HSET', keys.units, unit, (unit == 'next' or unit == 'done') and state or 'free')
  end
end
