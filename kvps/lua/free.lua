-- free: delete bytes that no reader can want any more. Only the owner of the slot may.
-- KEYS[1] owner string, [2...] what to delete
-- ARGV[1] term   [2] the server's life in which the caller read what is committed
-- Returns {OK, deleted} | {LOST, term} | {LIFE}: what was old then may be what is committed now
local owner = redis.call('GET', KEYS[1])
if owner ~= ARGV[1] then return { 'LOST', owner or '' } end
local lost = another_life(ARGV[2])
if lost then return lost end
return { 'OK', redis.call('UNLINK', unpack(KEYS, 2)) }
