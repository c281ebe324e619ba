-- What changed since a reader looked last: names from the stream of changes, each once, with their values now.
-- KEYS: 1 names of what changed  2 scores  3 acceptance records  4 live sums
-- ARGV: 1 id of the last change that the reader knows ('0-0': it read before there was any)  2 names of changes kept
-- Returns {} if the changes since then were forgotten: read all. Else {id of the last change, numbers of scores and
-- of acceptance records, {kind, name, value or nil, ...}}; a live sum's value is "rounds tokens Unix-seconds".
local entries = redis.call('XRANGE', KEYS[1], ARGV[1], '+')
local known = ARGV[1] ~= '0-0'
if known and (not entries[1] or entries[1][1] ~= ARGV[1]) then return {} end
if not known and #entries >= tonumber(ARGV[2]) then return {} end
local found, seen, last = {}, {}, ARGV[1]
for number, entry in ipairs(entries) do
  last = entry[1]
  local kind, name = entry[2][1], entry[2][2]
  if not (known and number == 1) and not seen[kind .. name] then
    seen[kind .. name] = true
    local value = false
    if kind == 's' then
      value = redis.call('HGET', KEYS[2], name)
    elseif kind == 'a' then
      value = redis.call('HGET', KEYS[3], name)
    else
      local sums = redis.call('HMGET', KEYS[4], name .. ':rounds', name .. ':tokens', name .. ':created')
      if sums[1] then value = sums[1] .. ' ' .. (sums[2] or '0') .. ' ' .. (sums[3] or '0') end
    end
    found[#found + 1] = kind
    found[#found + 1] = name
    found[#found + 1] = value
  end
end
return {last, redis.call('HLEN', KEYS[2]), redis.call('HLEN', KEYS[3]), found}
