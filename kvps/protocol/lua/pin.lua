-- pin: keep the bytes of the present version for a reader that is slower than the commits. A job has one pin: a reader
-- that finds it reads the pinned version. The flip to version + 2 is the first that would free them; it sees the pin.
-- KEYS pin:string never
-- ARGV job ms version_key
--   version_key: the version hash. It is no declared key: a reader may only read it, and Redis would ask for the right
--     to write it. It is in the same slot
-- USES job numbers replies
-- Returns {OK, pin JSON: version, names} | {NOJOB} | {ANOTHER} | {WRONGTYPE, key, is, want}
local another = another_job(redis.call('HGET', version_key, 'id'), job)
if another then return another end
local pin, left = redis.call('GET', keys.pin), redis.call('PTTL', keys.pin)
-- No pin lasts for longer than ten minutes, unless the server's clock was set back.
if pin and left * 2 > tonumber(ms) and left <= 600000 then return { 'OK', pin } end
local present = { names = {} }
for field, value in each_pair(redis.call('HGETALL', version_key)) do
  local shard = field:match('^shard:(%d+)$')
  if shard then present.names[shard] = value end
  if field == 'version' then present.version = whole(value) end
end
pin = cjson.encode(present)
redis.call('DEL', keys.pin) -- allowed when memory is full, and lets the script write
redis.call('SET', keys.pin, pin, 'PX', ms)
return { 'OK', pin }
