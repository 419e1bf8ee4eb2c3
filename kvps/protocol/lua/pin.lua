-- pin: keep the bytes of the present version for a reader that is slower than the commits. A job has one pin: a reader
-- that finds it reads the pinned version. The flip to version + 2 is the first that would free them; it sees the pin.
-- The version hash is no declared key: a reader may only read it, and Redis would ask for the right to write it.
-- KEYS[1] pin string
-- ARGV[1] job id   [2] ms   [3] version hash, in the same slot
-- Returns {OK, pin JSON: version, names} | {NOJOB} | {ANOTHER} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'string' })
if bad then return bad end
local another = another_job(redis.call('HGET', ARGV[3], 'id'))
if another then return another end
local pin, left = redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1])
-- No pin lasts for longer than ten minutes, unless the server's clock was set back.
if pin and left * 2 > tonumber(ARGV[2]) and left <= 600000 then return { 'OK', pin } end
local fields = redis.call('HGETALL', ARGV[3])
local now = { names = {} }
for i = 1, #fields, 2 do
  local shard = fields[i]:match('^shard:(%d+)$')
  if shard then now.names[shard] = fields[i + 1] end
  if fields[i] == 'version' then now.version = whole(fields[i + 1]) end
end
pin = cjson.encode(now)
redis.call('DEL', KEYS[1]) -- allowed when memory is full, and lets the script write
redis.call('SET', KEYS[1], pin, 'PX', ARGV[2])
return { 'OK', pin }
