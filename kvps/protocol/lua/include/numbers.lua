-- numbers: whole numbers from text and to text, and the lowest that is free. Only `whole` reads numbers from outside:
-- tonumber accepts nan, 0x10 and 1e3, and doubles above 2^53 do not hold every whole number.
local function whole(text)
  if type(text) ~= 'string' or #text > 16 or not text:find('^%d+$') then return nil end
  local number = tonumber(text)
  return number < 9007199254740992 and number or nil
end

-- Returns a whole number as text. %d takes half the instructions of %.0f, but has only 31 bits on a server of 32 bits.
local function digits(number) return string.format(number < 2147483648 and '%d' or '%.0f', number) end

-- Of parameters, as '0-3,7'; whoever reads them checks that they ascend. (kvps.arrays.number_ranges)
local function are_ranges(text)
  if #text > 65536 or text:find(('%d'):rep(8)) then return false end
  return (',' .. text):gsub(',%d+%-%d+', ''):gsub(',%d+', '') == ''
end

-- Returns the lowest number from `from` to `highest` whose field, with `prefix` before it, a hash does not have; nil if
-- there is none among the first ones. A worker may have written `from`, and any field.
local function lowest_free(hash, prefix, from, highest)
  local first = whole(from)
  if not first then return nil end
  for number = first, math.min(first + MOST_IDS, highest) do
    if redis.call('HEXISTS', hash, prefix .. digits(number)) == 0 then return number end
  end
end
