-- KEYS: the entry.  Its text goes, and its ticket.
redis.call('DEL', KEYS[1])
