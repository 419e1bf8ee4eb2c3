-- take: give a queue's first task to a host, and note the host in the same step: a task is always queued or noted.
-- KEYS queue:list started:zset suspended
-- ARGV prefix execution note...
--   prefix: of the keys of tasks
--   execution: the name of this execution
--   note: field, value, ... that describe the host
-- USES registries tasks
-- Returns {TAKEN, id, payload} also when repeated; the payload is '' if it is missing, too long or not ASCII
--     | {DROPPED, id}: no task has this id or can have it, or the task was cancelled
--     | {EMPTY} also when suspended: then no worker of RQ takes a task | {WRONGTYPE, key, is, want}
for _, task in ipairs(started(keys.started)) do
  if task.execution == execution then return { 'TAKEN', task.id, payload(prefix .. task.id) } end
end
local id = redis.call('EXISTS', keys.suspended) == 0 and redis.call('LPOP', keys.queue)
if not id then return { 'EMPTY' } end
local key = prefix .. id
local status, description, version, losses = fields(key, 'status', 'description', 'kvps_version', 'kvps_losses')
if not is_id(id) or not is_hash(key) or status == 'canceled' then return { 'DROPPED', plain(id, 200) } end
local data = payload(key)
redis.call('DEL', key) -- RQ's tools would import or unpickle its other fields, such as callbacks
redis.call('HSET', key, 'data', data, 'description', description, 'kvps_version', version, 'kvps_losses', losses)
redis.call('HSET', key, 'status', 'started', unpack(note))
redis.call('ZADD', keys.started, '+inf', id .. ':' .. execution) -- +inf: only kvps, never RQ, calls the task abandoned
return { 'TAKEN', id, data }
