-- leave: take an incarnation out of the vector clock. What it pushed still commits (draining); then it is gone.
-- KEYS[1] version hash, [2] workers hash, [3] heartbeat zset, [4] commits stream, [5] trace stream, [6] units hash,
--     [7] free units zset, [8] rounds zset, [9] pushed zset, [10] draining zset, [11] finished set, [12] turns stream
-- ARGV[1] job id   [2] worker   [3] incarnation   [4] '1' if it has done all its rounds, else '0'
--     [5] the name of the residual of all that it pushed, stored by it now or inherited at its join; or ''
--     [6...] the traces of its last iterations, "field value field value ..." each
-- Returns {OK, state} also when repeated, or when a later incarnation has the id | {EVICTED, state}: it was evicted or
--     cut off before, or its join is lost, and no later incarnation has the id | {RESTARTED} | {NOJOB} | {ANOTHER}
--     | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'hash', 'zset', 'stream', 'stream', 'hash', 'zset', 'zset', 'zset', 'zset', 'set', 'stream' })
if bad then return bad end
local at = redis.call('HMGET', KEYS[1], 'id', 'run_id')
local another = another_job(at[1])
if another then return another end
local worker, incarnation = ARGV[2], ARGV[3]
local entry = worker_entry(KEYS[2], worker)
-- A server that lost its last writes may have lost this join, and then every push of it. The entry that it has, if any,
-- is then of an earlier incarnation.
if not entry or entry.incarnations < (tonumber(incarnation:match('^%d+')) or 0) then return { 'EVICTED', 'unknown' } end
if entry.incarnation ~= incarnation then return { 'OK', 'replaced' } end
if entry.state ~= 'active' then return { entry.state == 'left' and 'OK' or 'EVICTED', entry.state } end
local lost = restarted(at[2])
if lost then return lost end
local keys = { units = KEYS[6], free_units = KEYS[7], rounds = KEYS[8], pushed = KEYS[9], draining = KEYS[10] }
local lowest = lowest_round(KEYS[8])
redis.call('ZREM', KEYS[3], worker) -- allowed when memory is full, and lets the script write
local state = depart(worker, entry, 'left', keys)
local freed = drop_unit(entry, keys)
entry.finished = ARGV[4] == '1'
if entry.finished then redis.call('SADD', KEYS[11], worker) end
-- The server may have accepted one push more than the worker knows of; then this residual is too old.
local own = incarnation .. ':' .. count(entry.accepted) .. ':'
local right = ARGV[5] == entry.residual or ARGV[5]:sub(1, #own) == own
entry.residual = right and ARGV[5] or nil
redis.call('HSET', KEYS[2], worker, cjson.encode(entry))
redis.call('XADD', KEYS[4], '*', 'kind', 'leave', 'worker', worker, 'incarnation', incarnation, 'state', state)
append(KEYS[5], ARGV, 6, 1)
local after = lowest_round(KEYS[8])
if freed or after ~= lowest then wake(KEYS[12], after) end
return { 'OK', state }
