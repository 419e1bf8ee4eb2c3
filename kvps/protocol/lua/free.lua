-- free: delete bytes that no reader can need any more, or rename them to keys that will be stored next and then reuse
-- the memory. Only the owner of the slot may do so.
-- KEYS[1] owner string, [2...] keys to delete, and behind those pairs: a dead key, and its new name
-- ARGV[1] term   [2] the server's run id when the caller read the committed version   [3] how many keys to delete
-- Returns {OK, deleted} | {LOST, term} | {RESTARTED}: a version that was old then may be the committed one now
local owner = redis.call('GET', KEYS[1])
if owner ~= ARGV[1] then return { 'LOST', owner or '' } end
local lost = restarted(ARGV[2])
if lost then return lost end
local number, deleted = whole(ARGV[3]), 0
if number > 0 then deleted = redis.call('UNLINK', unpack(KEYS, 2, number + 1)) end
for i = number + 2, #KEYS, 2 do
  -- A key that already has the new name is newer, so the dead key is deleted. A dead key that is gone is not renamed.
  if redis.call('EXISTS', KEYS[i]) == 0 or redis.call('RENAMENX', KEYS[i], KEYS[i + 1]) == 0 then
    deleted = deleted + redis.call('UNLINK', KEYS[i])
  end
end
return { 'OK', deleted }
