-- submit: put all tasks of a job into the queue, one behind the other, in one step.
-- KEYS[1] queue list, [2] set of queues
-- ARGV[1] what the keys of tasks begin with
--     [2...] for each task: its id, how many arguments follow, and these: field, value, ... of its hash
-- Returns {OK} also when repeated | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'list', 'set' })
if bad then return bad end
redis.call('SADD', KEYS[2], KEYS[1])
local at = 2
while at < #ARGV do
  local id, fields = ARGV[at], tonumber(ARGV[at + 1])
  local key = ARGV[1] .. id
  if redis.call('EXISTS', key) == 0 then
    redis.call('HSET', key, unpack(ARGV, at + 2, at + 1 + fields))
    insert(KEYS[1], id)
  end
  at = at + 2 + fields
end
return { 'OK' }
