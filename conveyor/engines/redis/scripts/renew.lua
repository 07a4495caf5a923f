-- KEYS: pools.  ARGV: life, then for each pool a count and so many names.
-- Answers the positions of names that had no life left.
local life = tonumber(ARGV[1])
local lost, position, at = {}, 0, 2
for _, pool in ipairs(KEYS) do
    local last = at + ARGV[at]
    for index = at + 1, last do
        position = position + 1
        local until_at = redis.call('ZSCORE', pool, ARGV[index])
        if until_at and tonumber(until_at) > now then
            redis.call('ZADD', pool, text(now + life), ARGV[index])
        else
            lost[#lost + 1] = position
        end
    end
    keep(pool, life)
    at = last + 1
end
return lost
