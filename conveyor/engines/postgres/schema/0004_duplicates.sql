-- Duplicates of a list share one fetch (SPEC.md 4.23).
ALTER TABLE jobs ADD COLUMN dedup boolean NOT NULL DEFAULT false;
ALTER TABLE tasks ADD COLUMN duplicate_of text COLLATE "C";
