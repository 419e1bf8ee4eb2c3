-- forget: free the name of a removed job, whose bytes are now unlinked. A late call, when the name was given to another
-- job that was removed in turn, changes nothing.
-- KEYS removed:string never
-- ARGV job
-- Returns {OK} | {OTHER}: the name is free, or another job of that name is being removed | {WRONGTYPE, key, is, want}
if redis.call('GET', keys.removed) ~= job then return { 'OTHER' } end
redis.call('DEL', keys.removed)
return { 'OK' }
