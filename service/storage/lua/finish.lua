-- End one entry: acknowledge, delete, count and, for a dead letter, keep its fields and its file. Redis 6.2
-- commands, `held.lua` and `remember.lua`.
-- KEYS: 1 queue  2 counters  3 batch hash  4 dead-letter stream  5 files of dead batches
-- ARGV: 1 group  2 entry_id  3 state (trained|skipped|dead)  4 reason  5 ended_seconds  6 key prefix
--       7 dead letters kept  8 '1' if a dead one's file is kept  9 bytes that may be remembered of batches that ended
--       10 code of a dead one's reason (`DeathCode`)  11 rollouts that were left out for NaN or infinity
-- Returns 1 if this call ended the entry, 0 if it had ended before (a late acknowledgement is harmless).
local queue, counters, batch = KEYS[1], KEYS[2], KEYS[3]
local entry = redis.call('XRANGE', queue, ARGV[2], ARGV[2])[1]
redis.call('XACK', queue, ARGV[1], ARGV[2])
if not entry then return 0 end
redis.call('XDEL', queue, ARGV[2])
local fields = {}
for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
local name = ARGV[6] .. 'held'
local held = held_of(redis.call('GET', name))
leave(held, fields)
redis.call('SET', name, written(held))
redis.call('HDEL', batch, 'memory_tries', 'memory_tried')
redis.call('HSET', batch, 'state', ARGV[3], 'reason', ARGV[4])
if ARGV[3] == 'dead' then
  redis.call('SET', ARGV[6] .. 'last_death', redis.call('HINCRBY', counters, 'dead_total', 1) .. ' ' .. ARGV[4])
  local letter = { 'XADD', KEYS[4], 'MAXLEN', '~', ARGV[7], '*' }
  for _, value in ipairs(entry[2]) do letter[#letter + 1] = value end
  letter[#letter + 1] = 'entry_id'
  letter[#letter + 1] = ARGV[2]
  letter[#letter + 1] = 'reason'
  letter[#letter + 1] = ARGV[4]
  letter[#letter + 1] = 'code'
  letter[#letter + 1] = ARGV[10]
  local letter_id = redis.call(unpack(letter))
  redis.call('HSET', batch, 'letter_id', letter_id, 'code', ARGV[10])
  if ARGV[8] == '1' then
    redis.call('ZADD', KEYS[5], string.match(letter_id, '^%d+'), fields['blob'] .. ':' .. fields['bytes'])
    redis.call('HINCRBY', counters, 'dead_file_bytes', fields['bytes'])
  end
else
  redis.call('HINCRBY', counters, 'acked_total', 1)
  if ARGV[3] == 'skipped' then redis.call('HINCRBY', counters, 'skipped_total', 1) end
  redis.call('HINCRBY', counters, 'not_finite_total', ARGV[11])
end
remember(ARGV[6], counters, fields['batch_id'], ARGV[5], ARGV[9])
return 1
