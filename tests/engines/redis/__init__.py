"""Tests of the Redis engine: outages of the server, scripts, slots and signals."""
