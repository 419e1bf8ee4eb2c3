-- leave: take an incarnation out of the vector clock. What it has pushed still commits (draining), then it is gone.
-- KEYS[1] workers hash, [2] heartbeat zset, [3] commits stream, [4] trace stream,
--     [5] units hash, [6] version hash
-- ARGV[1] worker   [2] incarnation   [3] '1' if it has done all its rounds, else '0'
--     [4] the name of the remainder that belongs to all it pushed: stored by it now, or the one it joined with; or ''
--     [5...] field, value, ... of the trace of its last iteration
-- Returns {OK, state} also when repeated, or when another has the id by now | {EVICTED, state}: it was out of the
--     clock before, or its join is lost, and nobody has taken its place | {LIFE} | {NOJOB}
--     | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'zset', 'stream', 'stream', 'hash', 'hash' })
if bad then return bad end
local server = redis.call('HGET', KEYS[6], 'server')
if not server then return { 'NOJOB' } end
local entry = worker_entry(KEYS[1], ARGV[1])
-- A server that lost its last writes may have lost the join too, and then all that was pushed: whom it knows there, if
-- anybody, came before.
if not entry or entry.life < (tonumber(ARGV[2]:match('^%d+')) or 0) then return { 'EVICTED', 'unknown' } end
if entry.incarnation ~= ARGV[2] then return { 'OK', 'replaced' } end
if entry.state == 'rejoining' then return { 'EVICTED', entry.state } end
if entry.state ~= 'active' then return { entry.left and 'OK' or 'EVICTED', entry.state } end
local lost = another_life(server)
if lost then return lost end
redis.call('ZREM', KEYS[2], ARGV[1]) -- allowed when memory is full, and lets the script write
depart(entry, KEYS[5])
entry.finished, entry.left = ARGV[3] == '1', true
-- One push more may have been accepted than its author knows.
local own = ARGV[2] .. ':' .. count(entry.accepted) .. ':'
local right = ARGV[4] == entry.remainder or ARGV[4]:sub(1, #own) == own
entry.remainder = right and ARGV[4] or nil
redis.call('HSET', KEYS[1], ARGV[1], cjson.encode(entry))
redis.call('XADD', KEYS[3], '*', 'kind', 'leave', 'worker', ARGV[1], 'incarnation', ARGV[2], 'state', entry.state)
if #ARGV > 4 then redis.call('XADD', KEYS[4], 'MAXLEN', '~', 1000, '*', unpack(ARGV, 5)) end
return { 'OK', entry.state }
