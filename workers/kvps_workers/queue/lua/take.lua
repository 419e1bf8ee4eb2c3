-- next_unit: the first task of the queue, for one host, in one step with the note of who has it: it is never in neither place.
-- KEYS[1] queue list, [2] started zset
-- ARGV[1] what the keys of tasks begin with, [2] the same of executions, [3] the name of this execution,
--     [4] how long a payload may be, bytes, [5] how many of the arguments that follow are for the task's hash, the rest
--     for the execution's   [6...] field, value, ...
-- Returns {TAKEN, id, payload} also when repeated; the payload is '' if it is longer
--     | {DROPPED, id}: no task has this id, or can have it (that is deleted), or it runs already, or was cancelled
--     | {EMPTY}
--     | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'list', 'zset' })
if bad then return bad end
local function taken(id)
  local key = ARGV[1] .. id
  local short = redis.call('HSTRLEN', key, 'data') <= tonumber(ARGV[4])
  return { 'TAKEN', id, short and redis.call('HGET', key, 'data') or '' }
end
for _, entry in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  if entry:sub(-#ARGV[3] - 1) == ':' .. ARGV[3] then return taken(task_of(entry)) end
end

local id = redis.call('LINDEX', KEYS[1], 0)
if not id then return { 'EMPTY' } end
local key, execution = ARGV[1] .. id, ARGV[2] .. id .. ':' .. ARGV[3]
redis.call('LPOP', KEYS[1])
if not id:match('^[%w_-]+$') then redis.call('UNLINK', key) end -- no id of RQ's
if not is_hash(key) or runs(KEYS[2], id) or redis.call('HGET', key, 'status') == 'canceled' then
  return { 'DROPPED', id }
end
local own = 5 + tonumber(ARGV[5])
redis.call('ZADD', KEYS[2], '+inf', id .. ':' .. ARGV[3]) -- RQ must not call it abandoned: who does is kvps
redis.call('HSET', key, unpack(ARGV, 6, own))
redis.call('HSET', execution, unpack(ARGV, own + 1))
return taken(id)
