-- terms: "<history>-<number>-<nonce>". Each holder of a shard has a number above all earlier ones.
-- USES numbers
local function term_number(term) return term and tonumber(term:match('^%w+%-(%d+)%-')) or 0 end

local function next_term(history, term, nonce) return history .. '-' .. digits(term_number(term) + 1) .. '-' .. nonce end
