-- trace: append entries to the trace of a shard: how long its holder took for each version.
-- KEYS version:hash shard_trace(shard):stream versions:hash never
-- ARGV job entries...
--   entries: "field value field value ..." each
-- USES job traces
-- Returns {OK} | {NOJOB} | {ANOTHER} | {RESTARTED} | {WRONGTYPE, key, is, want}
local refused = read_job(job)
if refused then return refused end
note_versions(keys.versions, append_traces(keys.shard_trace, entries, 1))
return { 'OK' }
