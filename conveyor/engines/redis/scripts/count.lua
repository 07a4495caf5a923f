-- KEYS: the pool.  ARGV: how the names of a run begin.  Answers how many of them live.
local count, start = 0, ARGV[1]
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. text(now), '+inf')) do
    if string.sub(name, 1, #start) == start then
        count = count + 1
    end
end
return count
