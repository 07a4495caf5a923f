-- Duplicates of a list share one fetch (SPEC.md 4.23).
ALTER TABLE jobs ADD COLUMN dedup INTEGER NOT NULL DEFAULT 0;
ALTER TABLE tasks ADD COLUMN duplicate_of TEXT;
