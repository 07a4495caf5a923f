-- KEYS: the pool.  ARGV: life, cap, how many at most, the stem of their names.
-- Answers how many were taken, and how many lived before.
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
