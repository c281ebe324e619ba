-- De-duplicate by batch and by rollout, bound by items, bytes and rollouts, count and enqueue one batch, atomically.
-- Redis 6.2 commands only, `held.lua` and `remember.lua`. Puts a dead batch back too, with its own file.
-- KEYS: 1 queue  2 counters  3 batch hash  4 dead-letter stream  5 files of dead batches
--       (the others share their hash tag, so also their slot)
-- ARGV: as named below. size: bytes of the file. rollout_ids: JSON. letter_seen: to put a dead batch back, the letter
--       of the death that was seen; else ''. max_rollouts: that may wait: each is a key of Redis. ended_seconds,
--       remembered_bytes: for how long, and how much, is remembered of batches that ended.
--       session, began: of the trainer that sends, and the first policy version that it had rollouts of; or ''
--       outdated_seconds: for how long it is known since when another one's are not used
-- Returns {"accepted", entry_id, dead_total, newest death's reason, known rollouts, a damaged blob, if this one replaces it}
--       | {"duplicate", state, dead_total, newest death's reason, known rollouts}
--       | {"full", items, bytes, rollouts} | {"disowned"} | {"gone"}: the dead batch's file is not kept
--       | {"outdated", "skipped", dead_total, newest death's reason}: another session has begun a later attempt
local max_items, max_bytes, prefix, batch_id, blob, size, tokens, rollouts, policy, policy_max, rollout_ids,
  letter_seen, ended_seconds, remembered_bytes, max_rollouts, session, began, outdated_seconds = unpack(ARGV)
local queue, counters, batch = KEYS[1], KEYS[2], KEYS[3]
local KEPT_SESSIONS, KEPT_RETURNS, KEPT_OUTDATED = 256, 64, 64
local bytes, back, file = tonumber(size), letter_seen ~= '', blob .. ':' .. size

-- All strings that matter here, in one command up to 1,000 rollouts, since each costs as much as many keys of one: the
-- four of the queue, the file and the trainer, then those of the rollouts, in the file's order.
local OTHERS, AT_ONCE = 4, 1004 -- keys of one command: Lua's stack has a few thousand places
local names = { prefix .. 'held', prefix .. 'last_death', prefix .. 'orphan:' .. blob, prefix .. 'attempt' }
local ids = cjson.decode(rollout_ids)
for _, id in ipairs(ids) do names[#names + 1] = prefix .. 'rollout:' .. id end
local found = {}
for first = 1, #names, AT_ONCE do
  local some = redis.call('MGET', unpack(names, first, math.min(first + AT_ONCE - 1, #names)))
  for i = 1, #some do found[#found + 1] = some[i] end
end
local held = held_of(found[1])
-- How many of the run's batches died so far, and why the newest did: the answer to the sender's next batch says it.
local total, reason = string.match(found[2] or '0 ', '^(%S+) (.*)$')

local function duplicate(state, known)
  if not back then redis.call('HINCRBY', counters, 'duplicates_total', 1) end
  return { 'duplicate', state, total, reason, tostring(known) }
end

local state, code, letter, old, old_bytes =
  unpack(redis.call('HMGET', batch, 'state', 'code', 'letter_id', 'blob', 'bytes'))
local died = state == 'dead'
-- A batch that died because its file was lost or damaged may be sent again: nothing was trained on it.
if state and not (died and (back or code == 'blob_missing' or code == 'blob_damaged')) then
  return duplicate(state, redis.call('HGET', batch, 'known_rollouts') or '0')
end
-- It was put back already, and has died again since it was asked for.
if back and died and letter and letter ~= letter_seen then return duplicate(state, '0') end
if back and not (died and redis.call('ZSCORE', KEYS[5], file)) then return { 'gone' } end

local replaced
local function leave_the_dead()
  if letter then
    redis.call('XDEL', KEYS[4], letter)
    total, reason = tell_last_death(prefix, total)
  end
  if redis.call('ZREM', KEYS[5], old .. ':' .. old_bytes) == 1 then
    redis.call('HINCRBY', counters, 'dead_file_bytes', -old_bytes)
    if not back then replaced = old end -- the damaged one, in whose place another came
  end
end

-- Rollouts that another batch brought before, by their place in the file. A batch that died or was skipped trained
-- nothing: its rollouts are whose who brings them next.
local known, states = {}, {}
for place = 0, #ids - 1 do
  local other = found[OTHERS + 1 + place]
  if other and other ~= batch_id then
    states[other] = states[other] or redis.call('HGET', prefix .. 'batch:' .. other, 'state') or 'expired'
    if states[other] == 'queued' or states[other] == 'trained' then
      known[#known + 1] = place
      state = states[other]
    end
  end
end
if #known == #ids then
  if back then
    state = 'skipped'
    leave_the_dead()
    redis.call('HSET', batch, 'state', state, 'reason', 'all its rollouts came in other batches meanwhile')
    redis.call('HDEL', batch, 'code')
  end
  return duplicate(state, #known)
end

if found[3] then return { 'disowned' } end

-- Which attempt of the trainer the batch is of, where that is told; nil: the readers of scores guess.
local number, lowest, highest = string.match(found[4] or '', '^(%d+) (%d+) (%d+)$')
number, lowest, highest = tonumber(number), tonumber(lowest), tonumber(highest)
local version, sessions, own, begins = tonumber(policy), prefix .. 'sessions', nil, nil
if back then
  own = tonumber(redis.call('HGET', batch, 'attempt') or '')
elseif session ~= '' then
  own = math.floor(tonumber(redis.call('ZSCORE', sessions, session) or '0'))
  if own == 0 then -- not a batch of it yet
    begins = math.min(tonumber(began), version)
    own = number or 1
    -- As early as that attempt, or from a checkpoint before its last version. What is later goes on with it.
    if number and (begins <= lowest or begins < highest) then own = number + 1 end
  end
  if number and own < number then
    if not died then
      redis.call('HINCRBY', counters, 'acked_total', 1)
      redis.call('HINCRBY', counters, 'skipped_total', 1)
      held[4] = held[4] + 1
      redis.call('SET', names[1], written(held))
      redis.call('HSET', batch, 'state', 'skipped', 'reason', 'it came after a later start of the trainer had begun',
        'blob', '', 'bytes', size, 'tokens', tokens, 'rollouts', rollouts, 'policy_version', policy,
        'policy_version_max', policy_max, 'rollout_ids', rollout_ids, 'known_rollouts', #known, 'attempt', own)
      remember(prefix, counters, batch_id, ended_seconds, remembered_bytes)
    end
    local now = redis.call('TIME')[1]
    local first, others = now, {}
    for line in string.gmatch(redis.call('GET', prefix .. 'outdated') or '', '[^\n]+') do
      local began, of = string.match(line, '^(%d+) %d+ (.*)$')
      if of == session then first = began elseif #others < KEPT_OUTDATED - 1 then others[#others + 1] = line end
    end
    table.insert(others, 1, first .. ' ' .. now .. ' ' .. session) -- the last one first
    redis.call('SET', prefix .. 'outdated', table.concat(others, '\n'), 'EX', outdated_seconds)
    return { 'outdated', 'skipped', total, reason }
  end
end

-- Note what the batch says of its session, once it is accepted. Of one attempt's sessions the newest stay: the score is
-- its number, and behind the point when the session came.
local function note_session(milliseconds)
  if begins then
    local new = redis.call('ZADD', sessions, string.format('%.0f.%s', own, milliseconds), session) == 1
    redis.call('ZREMRANGEBYRANK', sessions, 0, -KEPT_SESSIONS - 1)
    if new and own ~= (number or own) then -- else its registration was noted
      redis.call('XADD', prefix .. 'returns', 'MAXLEN', KEPT_RETURNS, '*', 'to', policy, 'attempt', 0)
    end
  end
  if own ~= number then lowest, highest = begins or version, version end
  local low, high = math.min(lowest, version), math.max(highest, version)
  if begins or low ~= lowest or high ~= highest then
    redis.call('SET', names[4], string.format('%.0f %.0f %.0f', own, low, high))
  end
end

if held[1] + 1 > tonumber(max_items) or held[2] + bytes > tonumber(max_bytes)
  or held[3] + tonumber(rollouts) > tonumber(max_rollouts) then
  redis.call('HINCRBY', counters, 'rejected_total', 1)
  local reply = { 'full' }
  for i = 1, 3 do reply[i + 1] = string.format('%.0f', held[i]) end
  return reply
end

-- What is put back has its place in time where it came first, unless its policy is still that of the newest batch.
local came = back and (redis.call('HGET', batch, 'arrived') or redis.call('HGET', batch, 'entry_id')) or ''
local belated = back and (redis.call('GET', prefix .. 'latest_policy') ~= policy_max or (own and number and own < number))
local more = back and { 'arrived', came } or {}
if own then more[#more + 1], more[#more + 2] = 'attempt', own end
local entry_id = redis.call('XADD', queue, '*', 'batch_id', batch_id, 'blob', blob, 'bytes', size,
  'tokens', tokens, 'rollouts', rollouts, 'policy_version', policy, 'policy_version_max', policy_max,
  'known', #known > 0 and cjson.encode(known) or '[]', 'put_back', back and '1' or '0',
  'arrived', belated and came or '', unpack(own and { 'attempt', own } or {}))
if died then leave_the_dead() end
if state then redis.call('DEL', batch) end
redis.call('HSET', batch, 'state', 'queued', 'reason', '', 'entry_id', entry_id, 'blob', blob, 'bytes', size,
  'tokens', tokens, 'rollouts', rollouts, 'policy_version', policy, 'policy_version_max', policy_max,
  'rollout_ids', rollout_ids, 'known_rollouts', #known, unpack(more))
if own and not back then note_session(string.match(entry_id, '^%d+')) end

held = { held[1] + 1, held[2] + bytes, held[3] + tonumber(rollouts), held[4], held[5], held[6] }
if back then held[5] = held[5] + 1 else held[4], held[6] = held[4] + 1, entry_id end
local taken, new = {}, { names[1], written(held) }
-- Of the newest batch, not the highest version: a trainer may go back to an earlier checkpoint.
if not back then new[3], new[4] = prefix .. 'latest_policy', policy_max end
for _, place in ipairs(known) do taken[place] = true end
for place = 0, #ids - 1 do
  if #new > 2 * AT_ONCE then
    redis.call('MSET', unpack(new))
    new = {}
  end
  if not taken[place] then new[#new + 1], new[#new + 2] = names[OTHERS + 1 + place], batch_id end
end
if #new > 0 then redis.call('MSET', unpack(new)) end
return { 'accepted', entry_id, total, reason, tostring(#known), replaced }
