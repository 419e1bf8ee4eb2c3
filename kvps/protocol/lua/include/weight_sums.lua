-- weight_sums: the sum of the weights of all contributions that were accepted from a worker, as text. In a job whose
-- rounds end by the clock, it tells which batch is the worker's next. The entry has earlier sums too, from before the
-- oldest contribution that may wait on: a version that the job goes back to lacks some of what was accepted.
-- USES numbers
local function sums_of(entry) return type(entry.weight_sums) == 'string' and entry.weight_sums or '0' end

local function weight_sum(entry) return sums_of(entry):match('%d*$') end

local function add_weight(entry, weight, max_pending)
  local sums = {}
  for sum in sums_of(entry):gmatch('%d+') do sums[#sums + 1] = sum end
  sums[#sums + 1] = digits(math.min((whole(sums[#sums]) or 0) + weight, 9007199254740991))
  entry.weight_sums = table.concat(sums, ' ', math.max(1, #sums - 2 * max_pending))
end

-- Returns whether a reduction takes weights. One of the user's own, module:function, may.
local function takes_weights(reduction)
  return reduction == 'weighted' or (reduction:find(':', 1, true) and not reduction:find('^trimmed:'))
end
