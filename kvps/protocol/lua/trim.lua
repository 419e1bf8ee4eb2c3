-- trim: delete the log before a commit's entry, when a file has the log up to that commit, or none is kept. The entry
-- itself stays: the newest weights are always checked against it. The time of the first join is noted before its entry
-- is deleted.
-- KEYS version:hash commits:stream never
-- ARGV job history entry version
--   history: in which the commit's entry was read
--   entry, version: the id of the commit's entry, and the version that it made
-- USES job numbers replies
-- Returns {OK, trimmed} also when repeated | {HISTORY, history} | {NOJOB} | {ANOTHER} | {RESTARTED}
--     | {WRONGTYPE, key, is, want}
local refused, present_history, moved, began = read_job(job, 'history', 'moved', 'began')
if refused then return refused end
if present_history ~= history then return { 'HISTORY', present_history } end
for _, each in ipairs(began and {} or redis.call('XRANGE', keys.commits, '-', '+', 'COUNT', 32)) do
  local id, fields = read_entry(each) -- others may have asked for something before anybody joined
  if fields.kind == 'join' and not began then began = fields.at_ms or id:match('^%d+') end
end
local trimmed = redis.call('XTRIM', keys.commits, 'MINID', entry)
if whole(version) > whole(moved or '0') then redis.call('HSET', keys.version, 'moved', version) end
if began then redis.call('HSET', keys.version, 'began', began) end
return { 'OK', trimmed }
