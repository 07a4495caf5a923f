-- This text is prepended to every script. Time is the server's, in whole microseconds. It is stored
-- as text, because Lua writes a bare number with 14 digits only.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local function text(number)
    return string.format('%.0f', number)
end

-- A key expires one second after its last member. Without an expiry, pools of ended jobs would stay
-- forever. An expiry is never shortened: another member may live longer.
local function keep(key, life)
    local wanted = math.ceil(life / 1000) + 1000
    if redis.call('PTTL', key) < wanted then
        redis.call('PEXPIRE', key, wanted)
    end
end
