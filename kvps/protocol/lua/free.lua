-- free: delete bytes that no reader can need any more, or rename them to keys that will be stored next and then reuse
-- the memory. Only the owner of the slot may do so.
-- KEYS owner(shard) dead... never_in(shard)
-- ARGV term run_id deletions
--   dead: keys to delete, and behind them pairs: a dead key, and its new name
--   run_id: the server's when the caller read the committed version
--   deletions: how many keys to delete
-- USES job numbers replies
-- Returns {OK, deleted} | {LOST, term} | {RESTARTED}: a version that was old then may be the committed one now
local owner = redis.call('GET', keys.owner)
if owner ~= term then return { 'LOST', owner or '' } end
local lost = restarted(run_id)
if lost then return lost end
local last, deleted = whole(deletions), 0
if last > 0 then deleted = redis.call('UNLINK', unpack(keys.dead, 1, last)) end
for old, new in each_pair(keys.dead, last + 1) do
  -- A key that already has the new name is newer, so the dead key is deleted. A dead key that is gone is not renamed.
  if redis.call('EXISTS', old) == 0 or redis.call('RENAMENX', old, new) == 0 then
    deleted = deleted + redis.call('UNLINK', old)
  end
end
return { 'OK', deleted }
