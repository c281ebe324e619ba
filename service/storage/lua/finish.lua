-- End one entry: acknowledge, delete, count and, for a dead letter, keep its fields. Redis 6.2 commands only.
-- KEYS: 1 queue  2 counters  3 batch hash  4 dead-letter stream
-- ARGV: 1 group  2 entry_id  3 state (trained|skipped|dead)  4 reason  5 ended_seconds  6 key prefix
--       7 dead letters kept
-- Returns 1 if this call ended the entry, 0 if it had ended before (a late acknowledgement is harmless).
local queue, counters, batch = KEYS[1], KEYS[2], KEYS[3]
local entry = redis.call('XRANGE', queue, ARGV[2], ARGV[2])[1]
redis.call('XACK', queue, ARGV[1], ARGV[2])
if not entry then return 0 end
redis.call('XDEL', queue, ARGV[2])
local fields = {}
for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
redis.call('HINCRBY', counters, 'items', -1)
redis.call('HINCRBY', counters, 'bytes', -tonumber(fields['bytes']))
redis.call('HSET', batch, 'state', ARGV[3], 'reason', ARGV[4])
redis.call('EXPIRE', batch, ARGV[5])
for _, id in ipairs(cjson.decode(redis.call('HGET', batch, 'rollout_ids') or '[]')) do
  redis.call('EXPIRE', ARGV[6] .. 'rollout:' .. id, ARGV[5])
end
if ARGV[3] == 'dead' then
  redis.call('HINCRBY', counters, 'dead_total', 1)
  local letter = { 'XADD', KEYS[4], 'MAXLEN', '~', ARGV[7], '*' }
  for _, value in ipairs(entry[2]) do letter[#letter + 1] = value end
  letter[#letter + 1] = 'entry_id'
  letter[#letter + 1] = ARGV[2]
  letter[#letter + 1] = 'reason'
  letter[#letter + 1] = ARGV[4]
  redis.call(unpack(letter))
else
  redis.call('HINCRBY', counters, 'acked_total', 1)
end
return 1
