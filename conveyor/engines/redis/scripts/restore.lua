-- KEYS: pools.  ARGV: life, then for each pool a count and so many names.
-- Puts names back that were held all the while, whatever the cap: their work is under way.
local life, at = tonumber(ARGV[1]), 2
for _, pool in ipairs(KEYS) do
    local last = at + ARGV[at]
    for index = at + 1, last do
        redis.call('ZADD', pool, text(now + life), ARGV[index])
    end
    keep(pool, life)
    at = last + 1
end
