-- rollback: continue from an earlier version whose bytes are all there, because the bytes of the present one are lost:
-- with shared memory, or with a server of a cluster. As in recover, all terms and incarnations end. Newer contributions
-- are done again, and the answer counts the versions lost.
-- KEYS version:hash workers:hash heartbeat:zset plan:hash ready:hash commits:stream units:hash pin:string clock:hash
-- KEYS skip:hash inbox:stream mirror:string turns:stream free_units:zset taken_units:zset rounds:zset pushed:zset
-- KEYS draining:zset finished:set ranks:hash config:hash states:hash rollouts:hash lease(*):string term(*):string never
-- ARGV job shard term history memory record
--   term: of the shard, which the caller holds
--   history: the new one
--   memory: the shared memory that the job is in from now on
--   record: the job at that version as JSON, with the head of the version that it replaces; '' for what `mirror` noted
-- USES earlier index job log numbers replies terms time turns
-- Returns {OK, version, versions lost} also when repeated | {TERM, term} | {HEAD, head} | {NOMIRROR} | {NOJOB}
--     | {ANOTHER} | {RESTARTED} | {WRONGTYPE, key, is, want}
local refused, version, before, head = read_job(job, 'version', 'history', 'head')
if refused then return refused end
if before == history then
  for _, entry in ipairs(redis.call('XREVRANGE', keys.commits, '+', '-', 'COUNT', 500)) do
    local _, fields = read_entry(entry)
    if fields.kind == 'recover' then return { 'OK', whole(fields.version), whole(fields.lost) } end
  end
end
local present_term = redis.call('GET', keys.term[shard + 1]) or ''
if present_term ~= term then return { 'TERM', present_term } end
local text = record ~= '' and record or redis.call('GET', keys.mirror)
if not text then return { 'NOMIRROR' } end
local earlier = cjson.decode(text)
if record ~= '' and earlier.replaces ~= head then return { 'HEAD', head } end
redis.call('DEL', keys.workers, keys.heartbeat, keys.plan, keys.ready, keys.pin, keys.clock, keys.skip, keys.inbox,
  keys.states)
-- Prompts that were trained in versions that are lost had their fate: their items are deleted.
if redis.call('EXISTS', keys.rollouts) == 0 then redis.call('DEL', keys.units) end
local function comes(worker) redis.call('ZADD', keys.heartbeat, now_ms(), worker) end
restore_hashes(earlier, {}, comes)
index_members()
-- Log entries behind that version are undone and deleted. The entries of earlier losses, of server or memory, stay, and
-- what people have asked for, because that is still so.
local stays = { recover = true, stop = true, suspend = true, pause = true, resume = true, set = true }
local behind = earlier.entry
repeat
  local entries = redis.call('XRANGE', keys.commits, '(' .. behind, '+', 'COUNT', 500)
  for _, entry in ipairs(entries) do
    local id, fields = read_entry(entry)
    if not stays[fields.kind] then redis.call('XDEL', keys.commits, id) end
    behind = id
  end
until #entries == 0
for i, key in ipairs(keys.term) do
  local old_term, name = redis.call('GET', key), earlier.names[i]
  redis.call('DEL', keys.lease[i])
  redis.call('SET', key, next_term(history, old_term, 'rollback'))
  redis.call('HSET', keys.version, 'shard:' .. digits(i - 1), name, 'before:' .. digits(i - 1), name)
end
redis.call('HSET', keys.config, 'memory', memory)
redis.call('HSET', keys.version, 'version', earlier.version, 'head', earlier.head, 'history', history)
local lost = whole(version) - whole(earlier.version)
log_entry('recover', 'version', earlier.version, 'head', earlier.head,
  'history', history, 'before', before, 'lost', digits(lost))
wake(lowest_round())
return { 'OK', whole(earlier.version), lost }
