-- Read before `enqueue` and `finish`: what is remembered of batches that ended. Redis 6.2 commands only.
-- `ended` holds "batch_id:bytes", oldest first; the counter `remembered_bytes` is their sum. These are bytes as Valkey 8
-- takes them for a batch's hash and its rollouts' keys, by measurement (tests/service/storage/test_queue.py).
local PER_BATCH, PER_ROLLOUT = 700, 130

-- Keep the fate of a batch that has ended, and of its rollouts, for `seconds`; forget those that ended first while the
-- run's take more than `most` bytes, but at most twice the new ones' at once. A batch that was put back since waits
-- again: it stays, and is listed again when it ends.
local function remember(prefix, counters, batch_id, seconds, most)
  local key, ended = prefix .. 'batch:' .. batch_id, prefix .. 'ended'
  local ids = redis.call('HGET', key, 'rollout_ids') or '[]'
  local bytes = PER_BATCH + #prefix + 2 * #ids
  for _, id in ipairs(cjson.decode(ids)) do
    bytes = bytes + PER_ROLLOUT + #prefix
    local rollout = prefix .. 'rollout:' .. id
    if redis.call('GET', rollout) == batch_id then redis.call('EXPIRE', rollout, seconds) end
  end
  redis.call('EXPIRE', key, seconds)
  local first = redis.call('RPUSH', ended, batch_id .. ':' .. bytes) == 1
  redis.call('EXPIRE', ended, seconds)
  if first then redis.call('HSET', counters, 'remembered_bytes', 0) end -- the list was over its time
  local held, left = redis.call('HINCRBY', counters, 'remembered_bytes', bytes), 2 * bytes
  while left > 0 and not first do
    local id, size = string.match(redis.call('LINDEX', ended, 0), '^(.*):(%d+)$')
    local other = prefix .. 'batch:' .. id
    local state, theirs = unpack(redis.call('HMGET', other, 'state', 'rollout_ids'))
    if id == batch_id or (state and held <= tonumber(most)) then break end -- without a state it is over its time
    redis.call('LPOP', ended)
    held, left = redis.call('HINCRBY', counters, 'remembered_bytes', -tonumber(size)), left - tonumber(size)
    if state and state ~= 'queued' then
      redis.call('UNLINK', other)
      for _, each in ipairs(cjson.decode(theirs or '[]')) do
        local rollout = prefix .. 'rollout:' .. each
        if redis.call('GET', rollout) == id then redis.call('UNLINK', rollout) end
      end
    end
  end
end
