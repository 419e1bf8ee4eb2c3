-- forget: free the name of a removed job, whose bytes are now unlinked. A late call, when the name was given to another
-- job that was removed in turn, changes nothing.
-- KEYS[1] removed string
-- ARGV[1] job id
-- Returns {OK} | {OTHER}: the name is free, or another job of that name is being removed | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'string' })
if bad then return bad end
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return { 'OTHER' } end
redis.call('DEL', KEYS[1])
return { 'OK' }
