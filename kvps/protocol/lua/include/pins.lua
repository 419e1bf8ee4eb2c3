-- pins: the pin, which a reader may write.

-- Returns the text of the pin; '' if there is none, or one that is longer than any of kvps.
local function pinned()
  return redis.call('STRLEN', keys.pin) <= MOST_PIN and redis.call('GET', keys.pin) or ''
end
