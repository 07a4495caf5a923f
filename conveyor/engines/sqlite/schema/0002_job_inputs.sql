-- Slots for uploaded lists. What was put into one is a blob.

CREATE TABLE job_inputs (
    input_id TEXT PRIMARY KEY,
    caller TEXT NOT NULL,
    spec TEXT NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL NOT NULL
) STRICT;
CREATE INDEX job_inputs_by_expiry ON job_inputs (expires_at);
