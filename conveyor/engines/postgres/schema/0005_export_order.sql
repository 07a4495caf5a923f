-- The order of the tasks in an export.
ALTER TABLE exports ADD COLUMN "order" text NOT NULL DEFAULT 'id';
