-- Mark a spooled file as an orphan, unless its entry names it: enqueue refuses it from now on. Redis 6.2 commands only.
-- KEYS: 1 batch hash  2 orphan key of the file   ARGV: 1 blob  2 seconds that the mark lasts
-- Returns 1 if the file may be deleted, 0 if it is in use.
local state, blob = unpack(redis.call('HMGET', KEYS[1], 'state', 'blob'))
if state == 'queued' and blob == ARGV[1] then return 0 end
redis.call('SET', KEYS[2], '', 'EX', ARGV[2])
return 1
