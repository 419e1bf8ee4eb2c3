-- own: note in a shard's slot which term may delete there. A late call of an older term changes nothing.
-- KEYS owner(shard):string never_in(shard)
-- ARGV term
-- USES terms
-- Returns {OK} also when repeated | {LOST, term} | {WRONGTYPE, key, is, want}
local owner = redis.call('GET', keys.owner)
if owner and owner ~= term and term_number(owner) >= term_number(term) then return { 'LOST', owner } end
redis.call('DEL', keys.owner) -- allowed when memory is full, and lets the script write
redis.call('SET', keys.owner, term)
return { 'OK' }
