-- time: the server's clock, the only clock of a job.
local function now_ms()
  local seconds, microseconds = unpack(redis.call('TIME'))
  return seconds * 1000 + math.floor(microseconds / 1000)
end
