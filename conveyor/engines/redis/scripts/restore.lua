-- KEYS: pools.  ARGV: lifetime, then for each pool a count and so many lease names.
-- Adds leases that a worker held while Redis was unavailable, even above the cap: their work is
-- running.
local life, at = tonumber(ARGV[1]), 2
for _, pool in ipairs(KEYS) do
    local last = at + ARGV[at]
    for index = at + 1, last do
        redis.call('ZADD', pool, text(now + life), ARGV[index])
    end
    keep(pool, life)
    at = last + 1
end
