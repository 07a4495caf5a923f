-- KEYS: the pool.  ARGV: prefix of the lease names of a run.  Returns how many of them are live.
local count, start = 0, ARGV[1]
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. text(now), '+inf')) do
    if string.sub(name, 1, #start) == start then
        count = count + 1
    end
end
return count
