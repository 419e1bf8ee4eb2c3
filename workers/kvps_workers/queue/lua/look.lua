-- look: count a queue's hosts, and list its running, waiting and last failed tasks, in this order. Changes nothing.
-- KEYS queue:list started:zset failed:zset hosts:set
-- ARGV prefix host_prefix most_waiting most_failed
--   prefix, host_prefix: of the keys of tasks, and of RQ's workers
--   most_waiting: 0 is all
-- USES registries tasks
-- Returns {OK, how many hosts, then {id, state, payload, execution, 1 if it was cancelled, process, host's last
--     heartbeat, why it failed} of each task} | {WRONGTYPE, key, is, want}
local hosts = 0
for _, host in ipairs(redis.call('SMEMBERS', keys.hosts)) do hosts = hosts + redis.call('EXISTS', host) end
local reply = { 'OK', hosts }

local function add(id, state, execution)
  local key = prefix .. id
  local status, process, host, reason = fields(key, 'status', 'kvps_process', 'worker_name', 'kvps_why')
  local beat, cancelled = fields(host_prefix .. host, 'last_heartbeat'), status == 'canceled' and 1 or 0
  reply[#reply + 1] = { plain(id, 200), state, payload(key), execution, cancelled, process, beat, reason }
end

for _, task in ipairs(started(keys.started)) do add(task.id, 'runs', task.execution) end
for _, id in ipairs(redis.call('LRANGE', keys.queue, 0, most_waiting - 1)) do add(id, 'waits', '') end
if tonumber(most_failed) > 0 then
  for _, id in ipairs(redis.call('ZREVRANGE', keys.failed, 0, most_failed - 1)) do add(id, 'failed', '') end
end
return reply
