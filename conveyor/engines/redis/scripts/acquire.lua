-- KEYS: the pool.  ARGV: lifetime, cap, maximum count, common prefix of the lease names.
-- Returns how many leases were acquired, and how many were live before.
-- Ended leases are removed first, so that ZCARD counts live ones only.
local life, cap = tonumber(ARGV[1]), tonumber(ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', text(now))
local live = redis.call('ZCARD', KEYS[1])
local count = math.min(tonumber(ARGV[3]), cap - live)
if count <= 0 then
    return {0, live}
end
for number = 1, count do
    redis.call('ZADD', KEYS[1], text(now + life), ARGV[4] .. '.' .. number)
end
keep(KEYS[1], life)
return {count, live}
