-- enter: begin an incarnation of an actor of a published job, or note a sign of life of one.
-- KEYS version:hash config:hash rollouts:hash actors:hash actor_beats:zset units:hash free_units:zset taken_units:zset
-- KEYS turns:stream never
-- ARGV job actor incarnation nonce process
--   incarnation: whose sign of life it is; '' to begin one
--   nonce: of this call
--   process: JSON: host, pid, ... of the process
-- USES job names numbers rollouts turns
-- Returns {OK, incarnation} also when repeated | {EVICTED, state} | {NONE}: the job takes no experience | {MANY}: too many
--     actors | {BAD}: no name, nonce or process | {NOJOB} | {ANOTHER} | {RESTARTED} | {WRONGTYPE, key, is, want}
local refused = read_job(job)
if refused then return refused end
if not read_rollouts() then return { 'NONE' } end
if incarnation ~= '' then
  local entry, gone = read_actor(actor, incarnation)
  if not entry then return gone end
  write_actor(actor, entry)
  return { 'OK', incarnation }
end
if not is_name(actor) or #nonce > 32 or not nonce:find('^%w+$') then return { 'BAD' } end
local before = read_entry_of(actor)
if before and before.nonce == nonce then return { 'OK', before.incarnation } end
if not before and redis.call('HLEN', keys.actors) >= MOST_IDS then return { 'MANY' } end
if #process > 16384 then return { 'BAD' } end
local entry = cjson.decode(process)
entry.unit, entry.offered_bytes = nil, nil
cjson.encode(entry) -- fails here if it cannot be written
redis.call('ZREM', keys.actor_beats, actor) -- allowed when memory is full, and lets the script write
if before then
  end_actor(actor, before)
  wake('')
end
-- The number tells a late copy of this call from the call; the nonce, one that a restart of the server has made again.
entry.nonce, entry.incarnation = nonce, digits(add(keys.rollouts, 'entered', 1)) .. '-' .. nonce
entry.offered, entry.last, entry.items = 0, 0, 0
write_actor(actor, entry)
return { 'OK', entry.incarnation }
