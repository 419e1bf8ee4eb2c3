-- free: delete bytes that no reader can want any more, or give them the names of bytes that will be stored next, whose
-- memory they then are. Only the owner of the slot may.
-- KEYS[1] owner string, [2...] what to delete, and behind that pairs: what may go, and its new name
-- ARGV[1] term   [2] the server's run id when the caller read what is committed   [3] how many to delete
-- Returns {OK, deleted} | {LOST, term} | {RESTARTED}: what was old then may be what is committed now
local owner = redis.call('GET', KEYS[1])
if owner ~= ARGV[1] then return { 'LOST', owner or '' } end
local lost = restarted(ARGV[2])
if lost then return lost end
local number, deleted = whole(ARGV[3]), 0
if number > 0 then deleted = redis.call('UNLINK', unpack(KEYS, 2, number + 1)) end
for i = number + 2, #KEYS, 2 do
  -- What is there under the new name is newer; and of what is gone there is no memory to give.
  if redis.call('EXISTS', KEYS[i]) == 0 or redis.call('RENAMENX', KEYS[i], KEYS[i + 1]) == 0 then
    deleted = deleted + redis.call('UNLINK', KEYS[i])
  end
end
return { 'OK', deleted }
