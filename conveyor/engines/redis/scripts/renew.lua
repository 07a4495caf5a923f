-- KEYS: pools.  ARGV: lifetime, then for each pool a count and so many lease names.
-- Returns the positions of leases that had ended. An ended lease is not renewed, because its place
-- may already belong to another worker.
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
