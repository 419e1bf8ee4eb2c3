-- arrivals: when contributions arrived in the inbox.
-- USES numbers

-- Returns when an entry of the inbox arrived. If that time lies in the future, the server's clock was set back, and the
-- entry counts as one that arrives at this look: that is noted (`graced`), so that the next look gets the same answer.
-- An entry of an earlier version of kvps has no time but its id.
local function arrival(id, arrived, now, graced)
  local time = whole(arrived) or tonumber(id:match('^%d+'))
  if time <= now then return time end
  local noted_id, noted = (graced or ''):match('^(%S+) (%d+)$')
  if noted_id == id and tonumber(noted) <= now then return tonumber(noted) end
  redis.call('HDEL', keys.version, 'graced') -- allowed when memory is full, and lets the script write
  redis.call('HSET', keys.version, 'graced', id .. ' ' .. digits(now))
  return now
end
