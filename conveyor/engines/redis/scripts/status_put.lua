-- KEYS: the status reports on a subject.  ARGV: lifetime, owner, text.
-- Stores the report, and removes the reports that have ended: fields of a hash do not expire alone.
local life = tonumber(ARGV[1])
redis.call('HSET', KEYS[1], ARGV[2], text(now + life) .. ' ' .. ARGV[3])
local marks = redis.call('HGETALL', KEYS[1])
for index = 1, #marks, 2 do
    if tonumber(string.match(marks[index + 1], '^%d+')) <= now then
        redis.call('HDEL', KEYS[1], marks[index])
    end
end
keep(KEYS[1], life)
