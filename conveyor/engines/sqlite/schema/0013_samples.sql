-- Samples of the counters of a run, at most one a minute: the series of the run is made of them.
CREATE TABLE samples (
    job_id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    minute INTEGER NOT NULL,
    at REAL NOT NULL,
    successful INTEGER NOT NULL,
    reasons TEXT NOT NULL,
    stored_bytes INTEGER NOT NULL,
    credits INTEGER NOT NULL,
    cost_micros INTEGER NOT NULL,
    PRIMARY KEY (job_id, run_id, minute)
) STRICT, WITHOUT ROWID;
ALTER TABLE runs ADD COLUMN sampled_at REAL;
ALTER TABLE runs ADD COLUMN sampled_done INTEGER NOT NULL DEFAULT 0;
