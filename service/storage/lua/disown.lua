-- Mark a spooled file as an orphan, unless its entry or its dead letter names it: enqueue refuses it from now on. Redis
-- 6.2 commands only.
-- KEYS: 1 batch hash  2 orphan key of the file  3 files of dead batches   ARGV: 1 blob  2 seconds that the mark lasts
-- Returns 1 if the file may be deleted, 0 if it is in use.
local state, blob, bytes = unpack(redis.call('HMGET', KEYS[1], 'state', 'blob', 'bytes'))
if blob == ARGV[1] then
  if state == 'queued' then return 0 end
  if state == 'dead' and redis.call('ZSCORE', KEYS[3], blob .. ':' .. bytes) then return 0 end
end
redis.call('SET', KEYS[2], '', 'EX', ARGV[2])
return 1
