-- own: note in a shard's slot which term may delete there. A late call of an older term changes nothing.
-- KEYS[1] owner string
-- ARGV[1] term
-- Returns {OK} also when repeated | {LOST, term} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'string' })
if bad then return bad end
local function number(term) return tonumber(term:match('^%w+%-(%d+)%-') or '0') end
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] and number(owner) >= number(ARGV[1]) then return { 'LOST', owner } end
redis.call('DEL', KEYS[1]) -- allowed when memory is full, and lets the script write
redis.call('SET', KEYS[1], ARGV[1])
return { 'OK' }
