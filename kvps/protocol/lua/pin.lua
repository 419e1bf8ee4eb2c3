-- pin: keep the bytes of the present version for a reader that is slower than the commits. A job has one pin: a reader
-- that finds it reads the pinned version. The flip to version + 2 is the first that would free them; it sees the pin.
-- KEYS[1] version hash, [2] pin string
-- ARGV[1] job id   [2] ms
-- Returns {OK, pin JSON: version, names} | {NOJOB} | {ANOTHER} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'string' })
if bad then return bad end
local another = another_job(redis.call('HGET', KEYS[1], 'id'))
if another then return another end
local pin, left = redis.call('GET', KEYS[2]), redis.call('PTTL', KEYS[2])
-- No pin lasts for longer than ten minutes, unless the server's clock was set back.
if pin and left * 2 > tonumber(ARGV[2]) and left <= 600000 then return { 'OK', pin } end
local fields = redis.call('HGETALL', KEYS[1])
local now = { names = {} }
for i = 1, #fields, 2 do
  local shard = fields[i]:match('^shard:(%d+)$')
  if shard then now.names[shard] = fields[i + 1] end
  if fields[i] == 'version' then now.version = whole(fields[i + 1]) end
end
pin = cjson.encode(now)
redis.call('DEL', KEYS[2]) -- allowed when memory is full, and lets the script write
redis.call('SET', KEYS[2], pin, 'PX', ARGV[2])
return { 'OK', pin }
