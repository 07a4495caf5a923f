-- KEYS: the entry.  ARGV: the ticket, the text.
-- Stores the text if the ticket is the newest. Otherwise returns the text of the entry, or nothing.
-- If the entry has another ticket and no text, it is removed: what its reader reads may be older
-- than what the caller has read and will show.
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
