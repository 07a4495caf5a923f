-- KEYS: the entry.  ARGV: life, version, a new ticket, and what may stand: 0 all, 1 texts, 2 none.
-- An entry is its version, when it dies, the last ticket, and its text, empty while it is read.
-- Answers the text, or whether the ticket is good: one that is out is left alone.
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
