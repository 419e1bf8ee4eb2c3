-- take: give a queue's first task to a host, and note the host in the same step: a task is always queued or noted.
-- KEYS[1] queue list, [2] started zset, [3] string that suspends all workers of RQ
-- ARGV[1] prefix of the keys of tasks, [2] the name of this execution, [3...] field, value, ... that describe the host
-- Returns {TAKEN, id, payload} also when repeated; the payload is '' if it is missing, too long or not ASCII
--     | {DROPPED, id}: no task has this id or can have it, or the task was cancelled
--     | {EMPTY} also when suspended | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'list', 'zset' })
if bad then return bad end
for _, one in ipairs(started(KEYS[2])) do
  if one[2] == ARGV[2] then return { 'TAKEN', one[1], payload(ARGV[1] .. one[1]) } end
end
local id = redis.call('EXISTS', KEYS[3]) == 0 and redis.call('LPOP', KEYS[1])
if not id then return { 'EMPTY' } end
local key = ARGV[1] .. id
local status, description, version, losses = fields(key, 'status', 'description', 'kvps_version', 'kvps_losses')
if not is_id(id) or not is_hash(key) or status == 'canceled' then return { 'DROPPED', plain(id, 200) } end
local data = payload(key)
redis.call('DEL', key) -- RQ's tools would import or unpickle its other fields, such as callbacks
redis.call('HSET', key, 'data', data, 'description', description, 'kvps_version', version, 'kvps_losses', losses)
redis.call('HSET', key, 'status', 'started', unpack(ARGV, 3))
redis.call('ZADD', KEYS[2], '+inf', id .. ':' .. ARGV[2]) -- +inf: only kvps, never RQ, calls the task abandoned
return { 'TAKEN', id, data }
