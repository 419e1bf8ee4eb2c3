-- free: delete bytes that no reader can want any more. Only the owner of the slot may.
-- KEYS[1] owner string, [2...] what to delete
-- ARGV[1] term
-- Returns {OK, deleted} | {LOST, term}
local owner = redis.call('GET', KEYS[1])
if owner ~= ARGV[1] then return { 'LOST', owner or '' } end
return { 'OK', redis.call('UNLINK', unpack(KEYS, 2)) }
