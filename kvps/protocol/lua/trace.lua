-- trace: append entries to the trace of a shard: how long its holder took for each version.
-- KEYS[1] version hash, [2] trace stream
-- ARGV[1] job id   [2...] entries: "field value field value ..."
-- Returns {OK} | {NOJOB} | {ANOTHER} | {RESTARTED} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'hash', 'stream' })
if bad then return bad end
local at = redis.call('HMGET', KEYS[1], 'id', 'run_id')
local refused = another_job(at[1]) or restarted(at[2])
if refused then return refused end
append(KEYS[2], ARGV, 2, 1)
return { 'OK' }
