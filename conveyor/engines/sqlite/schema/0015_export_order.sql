-- The order of the tasks in an export.
ALTER TABLE exports ADD COLUMN "order" TEXT NOT NULL DEFAULT 'id';
