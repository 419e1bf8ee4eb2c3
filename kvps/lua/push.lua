-- push: accept a contribution whose bytes the server has confirmed; a repeat gets the first answer.
-- KEYS[1] config hash, [2] version hash, [3] workers hash, [4] clock hash, [5] heartbeat zset, [6] inbox stream,
--     [7] trace stream, [8] units hash
-- ARGV[1] worker   [2] incarnation   [3] seq   [4] base version   [5] weight (1, or 0: counts as zeros)
--     [6] digests, a shard each, or '-'   [7] history   [8] the unit it used, or ''
--     [9] 'ask': only say whether it was accepted before
--     [10...] field, value, ... of the trace of the worker's iteration before this one
-- Returns {ACK, clock, round} | {NEW} (to 'ask') | {FULL, pending} | {EVICTED, state} | {SEQUENCE, accepted}
--     | {BASE, version} | {HISTORY, history} | {LIFE} | {UNIT, unit it has} | {BAD}: a digest or weight that is none
--     | {NOJOB} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'hash', 'hash', 'hash', 'zset', 'stream', 'stream', 'hash' })
if bad then return bad end
local config = redis.call('HMGET', KEYS[1], 'max_pending', 'units')
local limit = whole(config[1] or '')
if not limit then return { 'NOJOB' } end
local worker, seq, base = ARGV[1], whole(ARGV[3]), whole(ARGV[4])
local entry = worker_entry(KEYS[3], worker)
if not entry or entry.incarnation ~= ARGV[2] then return { 'EVICTED', entry and 'replaced' or 'unknown' } end
-- Before the state: what was accepted stays acknowledged, also to one who was evicted since.
if seq and seq == entry.accepted and seq > 0 then return { 'ACK', entry.acked, entry.round } end
if entry.state ~= 'active' then return { 'EVICTED', entry.state } end
if ARGV[9] == 'ask' then return { 'NEW' } end
if seq ~= entry.accepted + 1 then return { 'SEQUENCE', entry.accepted } end
local at = redis.call('HMGET', KEYS[2], 'version', 'history', 'server')
local lost = another_life(at[3])
if lost then return lost end
if at[2] ~= ARGV[7] then return { 'HISTORY', at[2] } end
if not base or base > whole(at[1]) then return { 'BASE', at[1] } end
if not ARGV[6]:find('^[%x,-]+$') or not ARGV[5]:find('^[01]$') then return { 'BAD' } end
if ARGV[8] ~= (entry.unit or '') or (config[2] ~= '0' and not entry.unit) then return { 'UNIT', entry.unit or '' } end
if entry.pending >= limit then return { 'FULL', entry.pending } end

local clock = tonumber(redis.call('HGET', KEYS[4], worker) or '0')
entry.accepted, entry.pending = seq, entry.pending + 1
entry.acked = clock + entry.pending
entry.round = entry.acked + entry.skip
redis.call('XADD', KEYS[6], '*', 'worker', worker, 'incarnation', entry.incarnation, 'seq', ARGV[3],
  'rank', entry.rank, 'round', count(entry.round), 'base', ARGV[4], 'weight', ARGV[5], 'unit', entry.unit or '-', 'digest', ARGV[6])
if entry.unit then redis.call('HSET', KEYS[8], entry.unit, worker .. ' pushed') end
entry.unit, entry.remainder = nil, nil
redis.call('HSET', KEYS[3], worker, cjson.encode(entry))
redis.call('ZADD', KEYS[5], now_ms(), worker)
if #ARGV > 9 then redis.call('XADD', KEYS[7], 'MAXLEN', '~', 1000, '*', unpack(ARGV, 10)) end
return { 'ACK', entry.acked, entry.round }
