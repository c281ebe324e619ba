-- Give up files of dead batches: those of before a time, then the oldest beyond a bound of bytes. Redis 6.2 commands.
-- KEYS: 1 counters  2 files of dead batches   ARGV: 1 Unix milliseconds  2 bytes that may stay
-- Returns the names of the files, which must be deleted.
local gone = {}
while true do
  local file, died = unpack(redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES'))
  local held = tonumber(redis.call('HGET', KEYS[1], 'dead_file_bytes') or '0')
  if not file or (tonumber(died) >= tonumber(ARGV[1]) and held <= tonumber(ARGV[2])) then return gone end
  local blob, bytes = string.match(file, '^(.*):(%d+)$')
  redis.call('ZREM', KEYS[2], file)
  redis.call('HINCRBY', KEYS[1], 'dead_file_bytes', -tonumber(bytes))
  gone[#gone + 1] = blob
end
