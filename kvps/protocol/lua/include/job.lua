-- job: refuses callers that mean another job, or that may remember more than the server does.

-- A job that was created under the name of a removed job is a different job: a script does nothing for a caller that
-- still means the removed one. `id` is the id in the version hash, `job` the id of the job that the caller means.
local function another_job(id, job)
  if id ~= job then return { id and 'ANOTHER' or 'NOJOB' } end
end

-- A server that was restarted, or a replica that was promoted, may have lost its last writes. Until a new history has
-- begun, no script accepts, commits or deletes anything, because its caller may remember more than the server does.
-- Nothing else is written either: the append-only file may end in half a transaction, and the next start would run that
-- half together with whatever a script writes behind it. The history begins when the server has rewritten the file.
-- `run_id` is the server's when the history began.
local function restarted(run_id)
  if not redis.call('INFO', 'server'):find('run_id:' .. run_id, 1, true) then return { 'RESTARTED' } end
end

-- Reads fields of the version hash. Returns the answer that refuses the caller, or nil, and then the fields.
local function read_job(job, ...)
  local fields = redis.call('HMGET', keys.version, 'id', 'run_id', ...)
  local id, run_id = unpack(fields)
  return another_job(id, job) or restarted(run_id), unpack(fields, 3)
end
