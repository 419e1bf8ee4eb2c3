-- pin: keep the bytes of the present version for a reader that is slower than the commits. One pin a job: who
-- finds one reads what it holds. The flip of version + 2 is the first that would free them, and it sees the pin.
-- KEYS[1] pin string, [2] version hash, [3] clock hash
-- ARGV[1] ms
-- Returns {OK, pin JSON: version, names, clock} | {NOJOB} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'string', 'hash', 'hash' })
if bad then return bad end
local pin = redis.call('GET', KEYS[1])
if pin and redis.call('PTTL', KEYS[1]) * 2 > tonumber(ARGV[1]) then return { 'OK', pin } end
local fields = redis.call('HGETALL', KEYS[2])
if #fields == 0 then return { 'NOJOB' } end
local now = { names = {}, clock = {} }
for i = 1, #fields, 2 do
  local shard = fields[i]:match('^shard:(%d+)$')
  if shard then now.names[shard] = fields[i + 1] end
  if fields[i] == 'version' then now.version = whole(fields[i + 1]) end
end
local clock = redis.call('HGETALL', KEYS[3])
for i = 1, #clock, 2 do now.clock[clock[i]] = whole(clock[i + 1]) end
pin = cjson.encode(now)
redis.call('DEL', KEYS[1]) -- allowed when memory is full, and lets the script write
redis.call('SET', KEYS[1], pin, 'PX', ARGV[1])
return { 'OK', pin }
