-- Scheduled jobs: when each fires, and with which list. One that has nothing left to fire has no
-- next_fire_at, and so no place among those that are due.

ALTER TABLE jobs ADD COLUMN type TEXT NOT NULL DEFAULT 'regular';
ALTER TABLE runs ADD COLUMN scheduled_for REAL;

CREATE TABLE schedules (
    job_id TEXT PRIMARY KEY,
    status TEXT NOT NULL,
    rule TEXT NOT NULL,
    overlap TEXT NOT NULL,
    source TEXT NOT NULL,
    total INTEGER NOT NULL,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    version INTEGER NOT NULL,
    next_fire_at REAL,
    last_fire_at REAL,
    skips TEXT NOT NULL
) STRICT;
CREATE INDEX schedules_by_due ON schedules (status, next_fire_at, job_id);
