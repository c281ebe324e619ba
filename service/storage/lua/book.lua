-- Compare-and-set: write the effect of one report, unless its reporter's account has changed. Redis 6.2 commands only.
-- KEYS: 1 reporters  2 acceptance records  3 unplaced reports  4 times of reports  5 live sums  6 their order
--       7 names of what changed, for readers that follow (`follow.lua`)  8 reporters without a round, by last report
-- ARGV: 1 reporter  2 its account as it was read ('' for none)  3 its account now ('' to forget it)  4 Unix seconds
--       5 live sums kept  6 changes as JSON: set {field, record}, del {field}, unplaced {field, record},
--         forget {field}, live {name, rounds, tokens, Unix seconds}  7 names of changes kept
--       8 '1' where the account has no round  9 reporters kept
-- Returns 1 if it was written, 0 if the account had changed, or a new one found no room: read it again.
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
if ARGV[2] == '' and ARGV[3] ~= '' and redis.call('ZCARD', KEYS[4]) >= tonumber(ARGV[9]) then return 0 end
local changes = cjson.decode(ARGV[6])
local function changed(kind, name) redis.call('XADD', KEYS[7], 'MAXLEN', '~', ARGV[7], '*', kind, name) end
for _, change in ipairs(changes.set) do
  redis.call('HSET', KEYS[2], change[1], change[2])
  changed('a', change[1])
end
for _, field in ipairs(changes.del) do
  redis.call('HDEL', KEYS[2], field)
  changed('a', field)
end
for _, change in ipairs(changes.unplaced) do redis.call('HSET', KEYS[3], change[1], change[2]) end
for _, field in ipairs(changes.forget) do redis.call('HDEL', KEYS[3], field) end
for _, sums in ipairs(changes.live) do
  if redis.call('HEXISTS', KEYS[5], sums[1] .. ':rounds') == 0 then redis.call('RPUSH', KEYS[6], sums[1]) end
  -- A sum beyond 64 bits stays as it is: an error here would leave the report half written.
  redis.pcall('HINCRBY', KEYS[5], sums[1] .. ':rounds', sums[2])
  redis.pcall('HINCRBY', KEYS[5], sums[1] .. ':tokens', sums[3])
  local created = tonumber(redis.call('HGET', KEYS[5], sums[1] .. ':created') or '0')
  redis.call('HSET', KEYS[5], sums[1] .. ':created', string.format('%.3f', math.max(created, sums[4])))
  changed('l', sums[1])
end
while redis.call('LLEN', KEYS[6]) > tonumber(ARGV[5]) do
  local oldest = redis.call('LPOP', KEYS[6])
  redis.call('HDEL', KEYS[5], oldest .. ':rounds', oldest .. ':tokens', oldest .. ':created')
  changed('l', oldest)
end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('ZREM', KEYS[4], ARGV[1])
  redis.call('ZREM', KEYS[8], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
  redis.call('ZADD', KEYS[4], ARGV[4], ARGV[1])
  if ARGV[8] == '1' then
    redis.call('ZADD', KEYS[8], ARGV[4], ARGV[1])
  else
    redis.call('ZREM', KEYS[8], ARGV[1])
  end
end
return 1
