-- KEYS: for each host pool its leases and its next admission time.
-- ARGV: lifetime, slack, then for each request: number of the pool, cap, spacing, lease name.
-- Returns 1 for each admitted request, else 0.
-- Spacing and cap are checked before either is used: a refused request uses up nothing.
local life, slack = tonumber(ARGV[1]), tonumber(ARGV[2])
local answers = {}
for first = 3, #ARGV, 4 do
    local pool, clock = KEYS[ARGV[first] * 2 - 1], KEYS[ARGV[first] * 2]
    local cap, spacing = tonumber(ARGV[first + 1]), tonumber(ARGV[first + 2])
    local next_at = tonumber(redis.call('GET', clock) or '0')
    -- A longer spacing set it. The current one applies at once.
    if next_at > now + spacing + slack then
        next_at = now
    end
    redis.call('ZREMRANGEBYSCORE', pool, '-inf', text(now))
    if (spacing > 0 and now < next_at - slack) or redis.call('ZCARD', pool) >= cap then
        answers[#answers + 1] = 0
    else
        redis.call('ZADD', pool, text(now + life), ARGV[first + 3])
        keep(pool, life)
        if spacing > 0 then
            next_at = math.max(next_at, now) + spacing
            redis.call('SET', clock, text(next_at), 'PX', math.ceil((next_at - now) / 1000) + 1000)
        end
        answers[#answers + 1] = 1
    end
end
return answers
