"""End-to-end tests: the whole program as real processes that communicate over sockets."""
