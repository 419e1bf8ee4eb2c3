-- pin: keep the bytes of the present version for a reader that is slower than the commits. A job has one pin: a reader
-- that finds it reads the pinned version. The flip to version + 2 is the first that would free them; it sees the pin.
-- KEYS pin:string never
-- ARGV job ms shards version_key
--   version_key: the version hash. It is no declared key: a reader may only read it, and Redis would ask for the right
--     to write it. It is in the same slot
-- USES job numbers pins
-- Returns {OK, pin JSON: version, names} | {NOJOB} | {ANOTHER} | {WRONGTYPE, key, is, want}
local another = another_job(redis.call('HGET', version_key, 'id'), job)
if another then return another end
local pin, left = pinned(), redis.call('PTTL', keys.pin)
-- No pin lasts for longer than ten minutes, unless the server's clock was set back.
if pin ~= '' and left * 2 > tonumber(ms) and left <= 600000 then return { 'OK', pin } end
local fields, names = {}, {}
for i = 1, math.min(whole(shards), MOST_SHARDS) do fields[i] = 'shard:' .. digits(i - 1) end -- a reader may send any number
for i, name in ipairs(redis.call('HMGET', version_key, unpack(fields))) do names[digits(i - 1)] = name or nil end
pin = cjson.encode({ version = whole(redis.call('HGET', version_key, 'version')), names = names })
redis.call('DEL', keys.pin) -- allowed when memory is full, and lets the script write
redis.call('SET', keys.pin, pin, 'PX', ms)
return { 'OK', pin }
