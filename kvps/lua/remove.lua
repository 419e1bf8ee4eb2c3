-- remove: forget a job, in one step for everybody: from here on every script answers NOJOB. Its name stays taken until
-- who called this has unlinked the bytes, so that nothing of a new job of that name can be among them.
-- KEYS[1] removed string, [2...] all control keys of the job
-- Returns {OK, deleted} | {WRONGTYPE, key, is, want}
local bad = wrong_type({ 'string' })
if bad then return bad end
redis.call('SET', KEYS[1], now_ms())
return { 'OK', redis.call('DEL', unpack(KEYS, 2)) }
