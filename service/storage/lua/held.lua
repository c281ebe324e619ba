-- Read before `enqueue`, `finish` and `discard`: two strings, so that an upload reads and writes them in the commands
-- of its rollouts' keys.
-- `held`: "items bytes rollouts accepted_total put_back_total newest", the first three of what is in the queue now.
-- `last_death`: "dead_total reason", the reason of the newest letter that is left. Redis 6.2 commands only.

-- Say again why the newest batch died, after its letter was taken from the list.
local function tell_last_death(prefix, total)
  local letter, reason = redis.call('XREVRANGE', prefix .. 'dead', '+', '-', 'COUNT', 1)[1], ''
  for i = 1, letter and #letter[2] or 0, 2 do
    if letter[2][i] == 'reason' then reason = letter[2][i + 1] end
  end
  redis.call('SET', prefix .. 'last_death', total .. ' ' .. reason)
  return tostring(total), reason
end

local function written(held) return string.format('%.0f %.0f %.0f %.0f %.0f %s', unpack(held)) end

-- The numbers of `held`.
local function held_of(text)
  local held = { string.match(text or '0 0 0 0 0 ', '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S*)$') }
  for i = 1, 5 do held[i] = tonumber(held[i]) end
  return held
end

-- An entry leaves the queue. Never below 0: what another version queued was not counted here.
local function leave(held, fields)
  for i, size in ipairs({ 1, tonumber(fields['bytes']), tonumber(fields['rollouts']) }) do
    held[i] = math.max(held[i] - size, 0)
  end
end
