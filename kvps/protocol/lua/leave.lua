-- leave: take an incarnation out of the vector clock. What it pushed still commits (draining); then it is gone.
-- KEYS version:hash workers:hash heartbeat:zset commits:stream trace(worker):stream units:hash free_units:zset
-- KEYS taken_units:zset rounds:zset pushed:zset draining:zset finished:set turns:stream losses:hash never
-- ARGV job worker incarnation finished residual traces...
--   finished: '1' if it has done all its rounds, else '0'
--   residual: the name of the residual of all that it pushed, which it has stored now or inherited at its join; or ''
--   traces: of its last iterations, "field value field value ..." each
-- USES job log numbers traces turns units workers
-- Returns {OK, state} also when repeated, or when a later incarnation has the id | {EVICTED, state}: it was evicted or
--     cut off before, or its join is lost, and no later incarnation has the id | {RESTARTED} | {NOJOB} | {ANOTHER}
--     | {WRONGTYPE, key, is, want}
local id, run_id = unpack(redis.call('HMGET', keys.version, 'id', 'run_id'))
local another = another_job(id, job)
if another then return another end
local entry = read_worker(worker)
-- A server that lost its last writes may have lost this join, and then every push of it. The entry that it has, if any,
-- is then of an earlier incarnation.
if not entry or entry.incarnations < (tonumber(incarnation:match('^%d+')) or 0) then return { 'EVICTED', 'unknown' } end
if entry.incarnation ~= incarnation then return { 'OK', 'replaced' } end
if entry.state ~= 'active' then return { entry.state == 'left' and 'OK' or 'EVICTED', entry.state } end
local lost = restarted(run_id)
if lost then return lost end
local lowest = lowest_round()
redis.call('ZREM', keys.heartbeat, worker) -- allowed when memory is full, and lets the script write
local state = depart(worker, entry, 'left')
local freed = drop_unit(worker, entry)
entry.finished = finished == '1'
if entry.finished then redis.call('SADD', keys.finished, worker) end
-- The server may have accepted one push more than the worker knows of; then this residual is too old.
local own = incarnation .. ':' .. digits(entry.accepted) .. ':'
local right = residual == entry.residual or residual:sub(1, #own) == own
entry.residual = right and residual or nil
write_worker(worker, entry)
log_entry('leave', 'worker', worker, 'incarnation', incarnation, 'state', state, 'finished', finished)
note_losses(keys.losses, append_traces(keys.trace, traces, 1))
local after = lowest_round()
if freed or after ~= lowest then wake(after) end
return { 'OK', state }
