-- reject: a contribution of the open plan turned out bad. It leaves by a log entry with the reason, and the plan goes
-- on for the same version without it, if need be without any step. Its worker's round is over when that version is
-- committed, not before: till then others may still wait for earlier rounds of his that stand in the same plan.
-- KEYS[1] version hash, [2] inbox stream, [3] plan string, [4] ready hash, [5] commits stream, [6] the term string
--     of the shard
-- ARGV[1] term   [2] plan id   [3] inbox id of the contribution   [4] reason
-- Returns {OK} | {TERM, term} | {PLAN} also when repeated | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'stream', 'string', 'hash', 'stream', 'string' })
if bad then return bad end
local holds = redis.call('GET', KEYS[6]) or ''
if holds ~= ARGV[1] then return { 'TERM', holds } end
local text = redis.call('GET', KEYS[3])
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
local left, part, right = text:sub(1, from - 1), text:sub(from, to - 1), text:sub(to)
if right:sub(1, 1) == ',' then
  right = right:sub(2)
elseif left:sub(-1) == ',' then
  left = left:sub(1, -2)
end
redis.call('DEL', KEYS[4]) -- allowed when memory is full, and lets the script write
local id = count(redis.call('HINCRBY', KEYS[1], 'plan_id', 1))
local rest = (left .. right):gsub('^{"id":%d+', '{"id":' .. id, 1)
rest = rest:gsub('%]}$', (rest:find('"rejected":[]', 1, true) and '' or ',') .. part .. ']}', 1)
redis.call('SET', KEYS[3], rest)
redis.call('XDEL', KEYS[2], out.id)
redis.call('XADD', KEYS[5], '*', 'kind', 'reject', 'worker', out.worker, 'incarnation', out.incarnation,
  'seq', count(out.seq), 'round', count(out.round), 'reason', ARGV[4], 'digest', out.digest)
return { 'OK' }
