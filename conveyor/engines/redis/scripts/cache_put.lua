-- KEYS: the entry.  ARGV: the ticket, the text.  Answers the text that stands instead, or nothing.
-- Another's ticket is taken away: what is read under it may be older than what we read.
local stands = redis.call('GET', KEYS[1])
if not stands then
    return ''
end
local version, dies_at, ticket, kept = string.match(stands, '^(%S+) (%d+) (%S+) (.*)$')
local left = tonumber(dies_at) - now
if ticket == ARGV[1] and left > 0 then
    local entry = version .. ' ' .. dies_at .. ' ' .. ticket .. ' ' .. ARGV[2]
    redis.call('SET', KEYS[1], entry, 'PX', math.ceil(left / 1000))
    return ''
elseif kept ~= '' and left > 0 then
    return kept
end
redis.call('DEL', KEYS[1])
return ''
