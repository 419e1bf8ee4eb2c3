-- log: appends an entry to the commit log. Its time is a field: an id is no time where the server's clock was set back,
-- as ids never go back.
-- USES numbers time
local function log_entry(kind, ...)
  return redis.call('XADD', keys.commits, '*', 'kind', kind, 'at_ms', digits(now_ms()), ...)
end
