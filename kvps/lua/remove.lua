-- remove: forget a job. From here on every script answers NOJOB; the bytes are unlinked by who called this.
-- KEYS[1...] all control keys of the job
-- Returns {OK, deleted}
return { 'OK', redis.call('DEL', unpack(KEYS)) }
