-- look: count a queue's hosts, and list its running, waiting and last failed tasks, in this order. Changes nothing.
-- KEYS[1] queue list, [2] started zset, [3] failed zset, [4] set of the queue's workers
-- ARGV[1] prefix of the keys of tasks, [2] prefix of the keys of RQ workers
--     [3] how many waiting tasks at most, 0 is all   [4] how many failed tasks at most
-- Returns {OK, how many hosts, then {id, state, payload, execution, 1 if it was cancelled, process, host's last
--     heartbeat, why it failed} of each task} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'list', 'zset', 'zset', 'set' })
if bad then return bad end
local hosts = 0
for _, host in ipairs(redis.call('SMEMBERS', KEYS[4])) do hosts = hosts + redis.call('EXISTS', host) end
local reply = { 'OK', hosts }

local function add(id, state, execution)
  local key = ARGV[1] .. id
  local status, process, host, why = fields(key, 'status', 'kvps_process', 'worker_name', 'kvps_why')
  local beat, cancelled = fields(ARGV[2] .. host, 'last_heartbeat'), status == 'canceled' and 1 or 0
  reply[#reply + 1] = { plain(id, 200), state, payload(key), execution, cancelled, process, beat, why }
end

for _, one in ipairs(started(KEYS[2])) do add(one[1], 'runs', one[2]) end
for _, id in ipairs(redis.call('LRANGE', KEYS[1], 0, ARGV[3] - 1)) do add(id, 'waits', '') end
if tonumber(ARGV[4]) > 0 then
  for _, id in ipairs(redis.call('ZREVRANGE', KEYS[3], 0, ARGV[4] - 1)) do add(id, 'failed', '') end
end
return reply
