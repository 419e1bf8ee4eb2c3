-- plan: open the next plan if the mode's condition holds. Takes no decision from its caller, so anyone may repeat it.
-- KEYS[1] config hash, [2] version hash, [3] workers hash, [4] clock hash, [5] inbox stream, [6] plan string,
--     [7] pin string
-- Returns {OPEN, version, pin, plan JSON} | {IDLE, version, pin} | {EARLY, version, pin, there}: fewer have joined
--     than the job wants at first, or fewer are left than it wants at least | {NOJOB} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'hash', 'hash', 'hash', 'stream', 'string', 'string' })
if bad then return bad end
local config = redis.call('HMGET', KEYS[1], 'staleness', 'workers', 'min_workers')
if not config[1] then return { 'NOJOB' } end
local at = redis.call('HMGET', KEYS[2], 'version', 'head', 'history')
local version = whole(at[1])
local pin = redis.call('GET', KEYS[7]) or ''
local open = redis.call('GET', KEYS[6])
if open then return { 'OPEN', version, pin, open } end
local joined = redis.call('HLEN', KEYS[3])
if joined < whole(config[2]) then return { 'EARLY', version, pin, joined } end

local there, chosen = {}, {}
for order, item in ipairs(redis.call('XRANGE', KEYS[5], '-', '+')) do
  local c = { id = item[1], order = order }
  for i = 1, #item[2], 2 do c[item[2][i]] = item[2][i + 1] end
  -- BSP takes the one round that is due; SSP and ASP what is there, in plans of a size that Lua can unpack.
  if (config[1] ~= '0' and #chosen < 4096) or whole(c.round) == version + 1 then
    chosen[#chosen + 1], there[c.worker] = c, true
  end
end
if #chosen == 0 then return { 'IDLE', version, pin } end

-- Who has done all its rounds still counts in the divisor, or the last contributions of a run would weigh more.
local members, divisor, progress, left = {}, 0, 0, 0
local all = redis.call('HGETALL', KEYS[3])
for i = 1, #all, 2 do
  local entry = cjson.decode(all[i + 1])
  if counts(entry) and config[1] == '0' and not there[all[i]] then return { 'IDLE', version, pin } end
  local member = counts(entry) or there[all[i]]
  if member then members[#members + 1] = { all[i], entry.rank } end
  if member or entry.finished then divisor = divisor + 1 end
  if counts(entry) or entry.finished then left = left + 1 end
  progress = progress + tonumber(redis.call('HGET', KEYS[4], all[i]) or '0')
end
if left < tonumber(config[3] or '0') then return { 'EARLY', version, pin, left } end
table.sort(members, function(a, b) return a[2] < b[2] end)
table.sort(chosen, function(a, b)
  if a.rank ~= b.rank then return tonumber(a.rank) < tonumber(b.rank) end
  return a.order < b.order
end)

local parts, names = {}, {}
for i, m in ipairs(members) do names[i] = '"' .. m[1] .. '"' end
for i, c in ipairs(chosen) do
  parts[i] = string.format('{"worker":"%s","incarnation":"%s","seq":%s,"round":%s,"base":%s,"weight":%s,'
    .. '"unit":%s,"digest":"%s","id":"%s"}', c.worker, c.incarnation, c.seq, c.round, c.base, c.weight,
    c.unit ~= '-' and c.unit or 'null', c.digest, c.id)
end
redis.call('DEL', KEYS[6]) -- allowed when memory is full, and lets the script write: only commits free memory
local id = redis.call('HINCRBY', KEYS[2], 'plan_id', 1)
open = string.format('{"id":%s,"version":%s,"head":"%s","history":"%s","divisor":%s,"progress":%s,'
  .. '"members":[%s],"contributions":[%s],"rejected":[]}', count(id), count(version + 1), at[2], at[3], count(divisor),
  count(progress), table.concat(names, ','), table.concat(parts, ','))
redis.call('SET', KEYS[6], open)
return { 'OPEN', version, pin, open }
