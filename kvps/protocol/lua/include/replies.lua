-- replies: reads flat lists of names and values.

-- Iterates over the pairs of a flat list, in its order: for name, value in each_pair(list) do.
local function each_pair(list, from)
  local i = (from or 1) - 2
  return function()
    i = i + 2
    return list[i], list[i + 1]
  end
end

-- Returns the id of a stream's entry, and its values by their names.
local function read_entry(entry)
  local id, list = unpack(entry)
  local fields = {}
  for i = 1, #list, 2 do fields[list[i]] = list[i + 1] end
  return id, fields
end
