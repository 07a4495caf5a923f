-- KEYS: the entry.  Removes its text and its ticket, so that a reader with that ticket cannot store.
redis.call('DEL', KEYS[1])
