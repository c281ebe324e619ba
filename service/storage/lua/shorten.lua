-- Forget batches that ended, the first ones first, until those that are remembered take so many bytes; some at a time.
-- KEYS: 1 counters   ARGV: 1 the run's prefix  2 bytes that may stay  3 how many batches are looked at, at most
-- Returns what they take then. Redis 6.2 commands only.
local held = redis.call('EXISTS', ARGV[1] .. 'ended') == 1 and redis.call('HGET', KEYS[1], 'remembered_bytes') or '0'
held = tonumber(held)
for _ = 1, tonumber(ARGV[3]) do
  local now = drop_oldest(ARGV[1], KEYS[1], held, tonumber(ARGV[2]), '')
  if not now then break end
  held = now
end
return held
