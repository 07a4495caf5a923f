-- Stands in front of every script. Time is the server's, in whole microseconds, as text where it
-- is stored: a bare number would be rounded to 14 digits.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local function text(number)
    return string.format('%.0f', number)
end

-- A key outlives whatever it holds by a second, then goes by itself.
local function keep(key, life)
    local wanted = math.ceil(life / 1000) + 1000
    if redis.call('PTTL', key) < wanted then
        redis.call('PEXPIRE', key, wanted)
    end
end
