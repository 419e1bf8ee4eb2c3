-- prompt: hand an actor the next prompt: the one that it has already, or the lowest that was given back, or the next one.
-- KEYS version:hash config:hash actors:hash actor_beats:zset units:hash free_units:zset taken_units:zset never
-- ARGV job actor incarnation
-- USES job numbers rollouts run_control
-- Returns {OK, prompt} also when repeated | {WAIT}: each is in other hands, or waits for its fate | {DONE}: all have had
--     their fate | {STOPPED, run, by, reason, at} | {NONE}: the job hands out no prompts | {EVICTED, state} | {NOJOB}
--     | {ANOTHER} | {RESTARTED} | {WRONGTYPE, key, is, want}
local refused, run = read_job(job, 'run')
if refused then return refused end
local s = read_rollouts()
if not s or s.units == 0 then return { 'NONE' } end
local entry, gone = read_actor(actor, incarnation)
if not entry then return gone end
if run and run ~= 'pause' then return run_answer('STOPPED') end
if entry.unit then return { 'OK', tonumber(entry.unit) } end
local unit = unpack(redis.call('ZRANGE', keys.free_units, 0, 0))
local next_one, done = unpack(redis.call('HMGET', keys.units, 'next', 'done'))
local fresh = counted(next_one)
if unit and not whole(unit) then error('free_units of the job: no unit') end
if not unit and fresh < s.units then unit = digits(fresh) end
if not unit then return { counted(done) >= s.units and 'DONE' or 'WAIT' } end
entry.unit = unit
write_actor(actor, entry)
if redis.call('ZREM', keys.free_units, unit) == 0 then redis.call('HSET', keys.units, 'next', digits(fresh + 1)) end
redis.call('HSET', keys.units, unit, actor .. ' generates')
redis.call('ZADD', keys.taken_units, unit, unit)
return { 'OK', tonumber(unit) }
