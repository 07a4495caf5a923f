"""A model of PostgreSQL: sessions, transactions and locks (`server`), and the statements that the
engine sends (`statements`)."""
