-- Take a dead batch from the list, and give its file up. It stays dead, and a duplicate when it is sent again, also
-- where its file was lost or damaged. Redis 6.2 commands only, and `held.lua`.
-- KEYS: 1 counters  2 batch hash  3 dead-letter stream  4 files of dead batches   ARGV: 1 key prefix
-- Returns the batch's state, and the name of the file that must be deleted if it was kept; nothing for an unknown batch.
local state, blob, bytes, letter, reason, code =
  unpack(redis.call('HMGET', KEYS[2], 'state', 'blob', 'bytes', 'letter_id', 'reason', 'code'))
if not state then return {} end
if state ~= 'dead' then return { state } end
if code ~= 'discarded' then redis.call('HSET', KEYS[2], 'reason', 'discarded: ' .. reason, 'code', 'discarded') end
if letter then
  redis.call('XDEL', KEYS[3], letter)
  tell_last_death(ARGV[1], redis.call('HGET', KEYS[1], 'dead_total') or '0')
end
if redis.call('ZREM', KEYS[4], blob .. ':' .. bytes) == 0 then return { state } end
redis.call('HINCRBY', KEYS[1], 'dead_file_bytes', -tonumber(bytes))
return { state, blob }
