-- run_control: whether somebody has paused, suspended or stopped the job. The field `run` of the version hash is missing
-- while it goes on; else it is 'pause', or 'suspend' or 'stop' and the last round.
-- USES staleness

-- Returns the round with which all workers end; nil if the job goes on or is paused.
local function last_round(run) return tonumber((run or ''):match('^s%l+ (%d+)$')) end

-- Returns whether a worker that has done `round` pushes behind the last round. With a quorum a version that is made, or
-- planned, has closed its round, and what comes later would go into the next one. In ASP no push is too late. Units of
-- later rounds are not handed out.
local function is_over(run, closes, bound, version, round)
  local last = last_round(run)
  if not last or closes == 'units' or bound < 0 then return false end
  return round >= last or (closes == 'quorum' and closed_rounds(version) >= last)
end

-- Returns an answer that says what the job does, and who has asked for that, why and when.
local function run_answer(code)
  return { code, unpack(redis.call('HMGET', keys.version, 'run', 'run_by', 'run_reason', 'run_at_ms'), 1, 4) }
end
