-- quit: end an actor's incarnation. What was accepted of it stays.
-- KEYS version:hash rollouts:hash actors:hash actor_beats:zset units:hash free_units:zset taken_units:zset
-- KEYS turns:stream never
-- ARGV job actor incarnation
-- USES job rollouts turns
-- Returns {OK} also when repeated | {NOJOB} | {ANOTHER} | {RESTARTED} | {WRONGTYPE, key, is, want}
local refused = read_job(job)
if refused then return refused end
local entry = read_entry_of(actor)
if entry and entry.incarnation == incarnation then
  end_actor(actor, entry)
  wake('')
end
return { 'OK' }
