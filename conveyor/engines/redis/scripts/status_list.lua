-- KEYS: the status reports on a subject.  Returns the texts of live ones, in the order of owners.
local marks, owners, texts = redis.call('HGETALL', KEYS[1]), {}, {}
for index = 1, #marks, 2 do
    local until_at, words = string.match(marks[index + 1], '^(%d+) (.*)$')
    if tonumber(until_at) > now then
        owners[#owners + 1] = marks[index]
        texts[marks[index]] = words
    end
end
table.sort(owners)
for position, owner in ipairs(owners) do
    owners[position] = texts[owner]
end
return owners
