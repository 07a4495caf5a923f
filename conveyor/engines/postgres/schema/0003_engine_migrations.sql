-- The migration of another engine's data into this database, and how far it is. Until it has ended
-- no process serves the database.
CREATE TABLE engine_migrations (
    migration_id text COLLATE "C" PRIMARY KEY,
    step text NOT NULL,
    position text,
    has_ended boolean NOT NULL
);
