-- Delete keys of a run, unless a later change of it did so before: that one's run may have begun since. Redis 6.2 commands only.
-- KEYS: 1 number of the latest change (fencing token)  2... at most some thousand keys to delete   ARGV: 1 number of this change
-- Returns how many were deleted; -1: a later change was here, and nothing is deleted.
local latest = redis.call('GET', KEYS[1])
if latest and tonumber(latest) > tonumber(ARGV[1]) then return -1 end
-- DEL comes before SET because Redis may be full (docs/reference/state.md, "Scripts").
redis.call('DEL', KEYS[1])
local gone = KEYS[2] and redis.call('DEL', unpack(KEYS, 2)) or 0
redis.call('SET', KEYS[1], ARGV[1])
return gone
