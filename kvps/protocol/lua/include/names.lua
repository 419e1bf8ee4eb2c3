-- names: the rule of names. It is Python's (kvps.parsing.NAME), and `read_sources` puts its two constants in.
local function is_name(text)
  return #text <= LONGEST_NAME and text:find('^[NAME_CHARACTERS]+$') ~= nil and not text:find('^[.=]')
end
