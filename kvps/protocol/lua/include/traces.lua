-- traces: appends entries to a trace, each a text of names and values. The traces of a thousand workers take no more
-- room than those of sixty.
local function append_traces(key, entries, workers)
  local most = math.max(50, math.min(1000, math.floor(60000 / workers)))
  for _, entry in ipairs(entries) do
    local values = {}
    for value in entry:gmatch('%S+') do values[#values + 1] = value end
    redis.call('XADD', key, 'MAXLEN', '~', most, '*', unpack(values))
  end
end
