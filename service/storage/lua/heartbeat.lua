-- Reset the idle time of a consumer's entries without counting a delivery; entries of other consumers stay as they are.
-- KEYS: 1 queue   ARGV: 1 group  2 consumer  3 delivery count to set, or '' to leave it  4... entry ids
-- Returns the ids still held.
local held = {}
for i = 4, #ARGV do
  local pending = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1)[1]
  if pending and pending[2] == ARGV[2] then
    if ARGV[3] == '' then
      redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'JUSTID')
    else
      redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'RETRYCOUNT', ARGV[3], 'JUSTID')
    end
    held[#held + 1] = ARGV[i]
  end
end
return held
