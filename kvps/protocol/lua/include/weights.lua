-- weights: how much a contribution counts.
-- Returns whether a reduction takes weights. One of the user's own, module:function, may.
local function takes_weights(reduction)
  return reduction == 'weighted' or (reduction:find(':', 1, true) and not reduction:find('^trimmed:'))
end
