"""The Postgres engine: rows, queues, leases and signals in one PostgreSQL database."""
