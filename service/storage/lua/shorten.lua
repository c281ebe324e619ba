-- Forget batches that ended, the first ones first, until those that are remembered take so many bytes; some at a time.
-- KEYS: 1 counters   ARGV: 1 the run's prefix  2 bytes that may stay  3 how many batches are looked at, at most
--       4 bytes after which it stops: nothing else runs meanwhile
-- Returns what they take then, how many it looked at, and how many are left. Redis 6.2 commands only.
local ended = ARGV[1] .. 'ended'
local held = redis.call('EXISTS', ended) == 1 and redis.call('HGET', KEYS[1], 'remembered_bytes') or '0'
held = tonumber(held)
local looked, bytes = 0, 0
while looked < tonumber(ARGV[3]) and bytes < tonumber(ARGV[4]) do
  local now, size = drop_oldest(ARGV[1], KEYS[1], held, tonumber(ARGV[2]), '')
  if not now then break end
  held, looked, bytes = now, looked + 1, bytes + size
end
return { held, looked, redis.call('LLEN', ended) }
