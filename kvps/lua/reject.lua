-- reject: a contribution of the open plan turned out bad. It leaves by a log entry with the reason, and the plan goes
-- on for the same version without it. A plan left empty commits no step: its worker's round is over all the same.
-- KEYS[1] version hash, [2] workers hash, [3] inbox stream, [4] plan string, [5] ready hash, [6] commits stream,
--     [7] the term string of the shard
-- ARGV[1] term   [2] plan id   [3] inbox id of the contribution   [4] reason
-- Returns {OK} | {TERM, term} | {PLAN} also when repeated | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'hash', 'stream', 'string', 'hash', 'stream', 'string' })
if bad then return bad end
local holds = redis.call('GET', KEYS[7]) or ''
if holds ~= ARGV[1] then return { 'TERM', holds } end
local text = redis.call('GET', KEYS[4])
local plan = text and cjson.decode(text)
if not plan or plan.id ~= whole(ARGV[2]) then return { 'PLAN' } end
local out
for _, c in ipairs(plan.contributions) do
  if c.id == ARGV[3] then out = c end
end
if not out then return { 'PLAN' } end

-- The plan is cut as text: decoding and encoding again would turn an empty list into an empty object.
local from, to
for part_from, part, part_to in text:gmatch('(){"worker":([^}]*)}()') do
  if part:find('"id":"' .. out.id .. '"', 1, true) then from, to = part_from, part_to end
end
local left, right = text:sub(1, from - 1), text:sub(to)
if right:sub(1, 1) == ',' then
  right = right:sub(2)
elseif left:sub(-1) == ',' then
  left = left:sub(1, -2)
end
local id = count(redis.call('HINCRBY', KEYS[1], 'plan_id', 1))
local rest = (left .. right):gsub('^{"id":%d+', '{"id":' .. id, 1)
redis.call('SET', KEYS[4], rest)
redis.call('DEL', KEYS[5])
redis.call('XDEL', KEYS[3], out.id)
local entry = worker_entry(KEYS[2], out.worker)
entry.pending, entry.skip = entry.pending - 1, entry.skip + 1
if entry.state == 'draining' and entry.pending == 0 then entry.state = 'gone' end
redis.call('HSET', KEYS[2], out.worker, cjson.encode(entry))
redis.call('XADD', KEYS[6], '*', 'kind', 'reject', 'worker', out.worker, 'incarnation', out.incarnation,
  'seq', count(out.seq), 'round', count(out.round), 'reason', ARGV[4], 'digest', out.digest)
return { 'OK' }
