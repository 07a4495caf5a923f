-- KEYS: the entry.  ARGV: lifetime, version, a new ticket, and what may be kept: 0 texts and
-- tickets, 1 texts only, 2 nothing.
-- An entry is: version, end, newest ticket, text. The text is empty while a reader reads.
-- Returns the text ('found'), or 'busy' if another reader has a ticket, or 'yours' if the new ticket
-- was stored. The lifetime begins with the ticket, before the read, so an entry is never older than
-- its lifetime.
local stands = redis.call('GET', KEYS[1])
if stands and ARGV[4] ~= '2' then
    local version, dies_at, _, kept = string.match(stands, '^(%S+) (%d+) (%S+) (.*)$')
    if version == ARGV[2] and tonumber(dies_at) > now then
        if kept ~= '' then
            return {'found', kept}
        elseif ARGV[4] == '0' then
            return {'busy', ''}
        end
    end
end
local life = tonumber(ARGV[1])
local entry = ARGV[2] .. ' ' .. text(now + life) .. ' ' .. ARGV[3] .. ' '
redis.call('SET', KEYS[1], entry, 'PX', math.ceil(life / 1000))
return {'yours', ''}
