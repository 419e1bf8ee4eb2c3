-- workers: the JSON entry of each worker, and how a worker gets out of the vector clock.
local function read_worker(worker)
  local text = redis.call('HGET', keys.workers, worker)
  return text and cjson.decode(text)
end

-- Fails, before anything is written, if the job knows of more workers: a look at all of them would take long.
local function check_ids(most)
  if redis.call('HLEN', keys.workers) > most then error('workers of the job: too many have ever joined') end
end

local function write_worker(worker, entry) redis.call('HSET', keys.workers, worker, cjson.encode(entry)) end

-- Returns whether a worker is in the vector clock. A rejoining worker is, which a restart of the server has cut off: the
-- others wait for it.
local function in_clock(entry) return entry.state == 'active' or entry.state == 'rejoining' end

-- Takes a worker out of the vector clock. Its contributions that wait still commit; until then it is draining.
local function depart(worker, entry, state)
  local waits = entry.round > tonumber(redis.call('ZSCORE', keys.rounds, worker) or '0')
  entry.state = state
  redis.call('ZREM', keys.pushed, worker)
  if waits then
    redis.call('ZADD', keys.draining, entry.round, worker)
  else
    redis.call('ZREM', keys.rounds, worker)
  end
  return waits and 'draining' or 'gone'
end
