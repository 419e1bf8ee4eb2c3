-- free: finds a number that nobody has.
-- USES numbers

-- Returns the lowest number from `from` to `highest` whose field, with `prefix` before it, a hash does not have; nil if
-- there is none among the first ones. A worker may have written `from`, and any field.
local function lowest_free(hash, prefix, from, highest)
  local first = whole(from)
  if not first then return nil end
  for number = first, math.min(first + MOST_IDS, highest) do
    if redis.call('HEXISTS', hash, prefix .. digits(number)) == 0 then return number end
  end
end
