-- numbers: whole numbers from text and to text. Only `whole` reads numbers from outside: tonumber accepts nan, 0x10 and
-- 1e3, and doubles above 2^53 do not hold every whole number.
local function whole(text)
  if type(text) ~= 'string' or #text > 16 or not text:find('^%d+$') then return nil end
  local number = tonumber(text)
  return number < 9007199254740992 and number or nil
end

local function digits(number) return string.format('%.0f', number) end
