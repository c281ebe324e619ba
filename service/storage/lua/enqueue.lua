-- De-duplicate, bound by items and bytes, count and enqueue one batch, atomically. Redis 6.2 commands only.
-- KEYS: 1 queue  2 counters  3 batch hash  4 dead-letter stream (the others share their hash tag, so also their slot)
-- ARGV: 1 max_items  2 max_bytes  3 overflow (reject|drop_oldest)  4 group  5 ended_seconds  6 key prefix
--       7 batch_id  8 blob  9 bytes  10 tokens  11 rollouts  12 policy_version  13 policy_version_max
--       14 rollout_ids (JSON)
-- Returns {"accepted", entry_id, dead_total, newest death's reason, dropped blobs...}
--       | {"duplicate", state, dead_total, newest death's reason} | {"full", items, bytes, dropped blobs...} | {"disowned"}
local queue, counters, batch = KEYS[1], KEYS[2], KEYS[3]
local prefix, bytes = ARGV[6], tonumber(ARGV[9])

-- How many of the run's batches died so far, and why the newest did: the answer to the sender's next batch says it.
local function deaths()
  local total, reason = redis.call('HGET', counters, 'dead_total') or '0', ''
  local letter = total ~= '0' and redis.call('XREVRANGE', KEYS[4], '+', '-', 'COUNT', 1)[1]
  for i = 1, letter and #letter[2] or 0, 2 do
    if letter[2][i] == 'reason' then reason = letter[2][i + 1] end
  end
  return total, reason
end

local known = redis.call('HGET', batch, 'state')
-- A batch that died because its file was lost may be sent again: nothing was trained on it.
if known and not (known == 'dead' and redis.call('HGET', batch, 'reason') == 'blob_missing') then
  redis.call('HINCRBY', counters, 'duplicates_total', 1)
  return { 'duplicate', known, deaths() }
end

if redis.call('EXISTS', prefix .. 'orphan:' .. ARGV[8]) == 1 then return { 'disowned' } end

local function held(field)
  return tonumber(redis.call('HGET', counters, field) or '0')
end

local function over()
  return held('items') + 1 > tonumber(ARGV[1]) or held('bytes') + bytes > tonumber(ARGV[2])
end

local dropped = {}
if ARGV[3] == 'drop_oldest' and over() then
  local last = '0-0'
  for _, group in ipairs(redis.call('EXISTS', queue) == 1 and redis.call('XINFO', 'GROUPS', queue) or {}) do
    local info = {}
    for i = 1, #group, 2 do info[group[i]] = group[i + 1] end
    if info['name'] == ARGV[4] then last = info['last-delivered-id'] end
  end
  while over() do
    -- Only entries that were never delivered: others may be half way through training.
    local oldest = redis.call('XRANGE', queue, '(' .. last, '+', 'COUNT', 1)[1]
    if not oldest then break end
    local fields = {}
    for i = 1, #oldest[2], 2 do fields[oldest[2][i]] = oldest[2][i + 1] end
    redis.call('XDEL', queue, oldest[1])
    redis.call('HINCRBY', counters, 'items', -1)
    redis.call('HINCRBY', counters, 'bytes', -tonumber(fields['bytes']))
    redis.call('HINCRBY', counters, 'dropped_total', 1)
    local key = prefix .. 'batch:' .. fields['batch_id']
    redis.call('HSET', key, 'state', 'skipped', 'reason', 'dropped: the queue was full and newer rollouts came')
    redis.call('EXPIRE', key, ARGV[5])
    for _, id in ipairs(cjson.decode(redis.call('HGET', key, 'rollout_ids') or '[]')) do
      redis.call('EXPIRE', prefix .. 'rollout:' .. id, ARGV[5])
    end
    dropped[#dropped + 1] = fields['blob']
  end
end

if over() then
  redis.call('HINCRBY', counters, 'rejected_total', 1)
  local reply = { 'full', tostring(held('items')), tostring(held('bytes')) }
  for _, blob in ipairs(dropped) do reply[#reply + 1] = blob end
  return reply
end

local entry_id = redis.call('XADD', queue, '*', 'batch_id', ARGV[7], 'blob', ARGV[8], 'bytes', ARGV[9],
  'tokens', ARGV[10], 'rollouts', ARGV[11], 'policy_version', ARGV[12], 'policy_version_max', ARGV[13])
redis.call('HINCRBY', counters, 'items', 1)
redis.call('HINCRBY', counters, 'bytes', bytes)
redis.call('HINCRBY', counters, 'accepted_total', 1)
redis.call('DEL', batch)
redis.call('HSET', batch, 'state', 'queued', 'reason', '', 'entry_id', entry_id, 'blob', ARGV[8], 'bytes', ARGV[9],
  'tokens', ARGV[10], 'rollouts', ARGV[11], 'policy_version', ARGV[12], 'policy_version_max', ARGV[13],
  'rollout_ids', ARGV[14])
-- Of the newest batch, not the highest version: a trainer may go back to an earlier checkpoint.
redis.call('SET', prefix .. 'latest_policy', ARGV[13])
for _, id in ipairs(cjson.decode(ARGV[14])) do
  redis.call('SET', prefix .. 'rollout:' .. id, ARGV[7])
end
local reply = { 'accepted', entry_id, deaths() }
for _, blob in ipairs(dropped) do reply[#reply + 1] = blob end
return reply
