-- tasks: reads the hashes of tasks. The keys are RQ's, and anybody who may write to the server may have put anything
-- there. Every reply is printable ASCII.
local function is_hash(key) return redis.call('TYPE', key).ok == 'hash' end

-- Returns a value as at most `most` characters of such text.
local function plain(value, most) return ((value or ''):sub(1, most):gsub('[^\32-\126]', '?')) end

-- Returns whether a task may have this id. A longer one would be cut in replies, and then name no task.
local function is_id(id) return #id <= 200 and id:find('^[%w_-]+$') end

-- Returns fields of a hash as such text; '' for each if the key holds no hash.
local function fields(key, ...)
  local values = {}
  for i, name in ipairs({ ... }) do values[i] = is_hash(key) and plain(redis.call('HGET', key, name), 500) or '' end
  return unpack(values)
end

-- Returns the call (JSON) of a task; '' if there is none, if it is too long, or if it is not printable ASCII.
local function payload(key)
  if not is_hash(key) or redis.call('HSTRLEN', key, 'data') > 1024 then return '' end
  local data = redis.call('HGET', key, 'data') or ''
  return data:find('[^\32-\126]') and '' or data
end
