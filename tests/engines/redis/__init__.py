"""What the Redis engine alone has: a server that goes away, scripts, slots and signals."""
