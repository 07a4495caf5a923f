-- HMAC keys, a claim and a log on every notice, and notices in the order of their runs.

CREATE TABLE signing_keys (
    caller TEXT PRIMARY KEY,
    active TEXT NOT NULL,
    version INTEGER NOT NULL,
    candidate TEXT
) STRICT;

ALTER TABLE notices ADD COLUMN due_since REAL NOT NULL DEFAULT 0;
ALTER TABLE notices ADD COLUMN claim INTEGER NOT NULL DEFAULT 0;
ALTER TABLE notices ADD COLUMN tries TEXT NOT NULL DEFAULT '[]';
UPDATE notices SET due_since = occurred_at;

DROP INDEX notices_by_run;
CREATE INDEX notices_by_run ON notices (job_id, run_id, occurred_at, notice_id);
