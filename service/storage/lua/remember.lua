-- Read before `enqueue`, `finish` and `shorten`: what is remembered of batches that ended. Redis 6.2 commands only.
-- `ended` holds "batch_id:number:bytes", oldest first; the counter `remembered_bytes` is their sum. These are bytes as
-- Valkey 8 takes them for a batch's hash and its rollouts' keys, by measurement (tests/service/storage/test_queue.py).
-- A batch that was sent again or put back is another one: its hash has the number of its last end, or none yet.
local PER_BATCH, PER_ROLLOUT = 740, 130

-- Forget an ended batch and its rollouts. `file`: "blob:bytes" of a dead one; where it was kept it is given up too, and
-- the reaper of the spool finds that nothing names it.
local function forget(prefix, counters, batch_id, ids, file)
  redis.call('UNLINK', prefix .. 'batch:' .. batch_id)
  for _, id in ipairs(cjson.decode(ids)) do
    local rollout = prefix .. 'rollout:' .. id
    if redis.call('GET', rollout) == batch_id then redis.call('UNLINK', rollout) end
  end
  if file and redis.call('ZREM', prefix .. 'dead_files', file) == 1 then
    redis.call('HINCRBY', counters, 'dead_file_bytes', -tonumber(string.match(file, '%d+$')))
  end
end

-- Forget the batch that ended first, while those that are remembered take `held` bytes, more than `most`. Returns what
-- they take then and what that batch took; nothing where it stays. A dead batch whose file is kept is spared, so that it
-- can be put back, until all take twice `most`. `newest`: a batch that stays in any case.
local function drop_oldest(prefix, counters, held, most, newest)
  local ended = prefix .. 'ended'
  local oldest = redis.call('LINDEX', ended, 0)
  if not oldest then return end
  local id, its_number, size = string.match(oldest, '^(.*):(%d+):(%d+)$')
  local state, now, theirs, blob, file_bytes = unpack(redis.call('HMGET', prefix .. 'batch:' .. id,
    'state', 'ended_number', 'rollout_ids', 'blob', 'bytes'))
  local is_it = now == its_number -- else it is over its time, or was sent again
  if is_it and (id == newest or held <= most) then return end
  redis.call('LPOP', ended) -- first: Redis lets a script that has freed something go on while it is full
  local file = is_it and state == 'dead' and blob and blob .. ':' .. file_bytes
  if file and held <= 2 * most and redis.call('ZSCORE', prefix .. 'dead_files', file) then
    redis.call('RPUSH', ended, oldest)
    return held, tonumber(size)
  end
  held = redis.call('HINCRBY', counters, 'remembered_bytes', -tonumber(size))
  if is_it then forget(prefix, counters, id, theirs or '[]', file) end
  return held, tonumber(size)
end

-- Keep the fate of a batch that has ended, and of its rollouts, for `seconds`; forget those that ended first while the
-- run's take more than `most` bytes, but at most twice the new ones' at once.
local function remember(prefix, counters, batch_id, seconds, most)
  local key, ended = prefix .. 'batch:' .. batch_id, prefix .. 'ended'
  local ids = redis.call('HGET', key, 'rollout_ids') or '[]'
  local bytes = PER_BATCH + #prefix + 2 * #ids
  for _, id in ipairs(cjson.decode(ids)) do
    bytes = bytes + PER_ROLLOUT + #prefix
    local rollout = prefix .. 'rollout:' .. id
    if redis.call('GET', rollout) == batch_id then redis.call('EXPIRE', rollout, seconds) end
  end
  local number = redis.call('HINCRBY', counters, 'ended_number', 1)
  redis.call('HSET', key, 'ended_number', number)
  redis.call('EXPIRE', key, seconds)
  local first = redis.call('RPUSH', ended, batch_id .. ':' .. number .. ':' .. bytes) == 1
  redis.call('EXPIRE', ended, seconds)
  if first then redis.call('HSET', counters, 'remembered_bytes', 0) end -- the list was over its time
  local held, left = redis.call('HINCRBY', counters, 'remembered_bytes', bytes), 2 * bytes
  most = tonumber(most)
  while left > 0 and not first do
    local now, size = drop_oldest(prefix, counters, held, most, batch_id)
    if not size then break end
    held, left = now, left - size
  end
end
