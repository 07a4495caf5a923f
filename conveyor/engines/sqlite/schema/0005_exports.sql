-- Exports, and the expiry of results.

CREATE TABLE exports (
    job_id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    export_id TEXT NOT NULL,
    format TEXT NOT NULL,
    status TEXT NOT NULL,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    due_at REAL NOT NULL,
    total INTEGER NOT NULL,
    done INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    failures INTEGER NOT NULL,
    error TEXT,
    key TEXT,
    size_bytes INTEGER NOT NULL,
    sha256 TEXT,
    manifest TEXT,
    PRIMARY KEY (job_id, run_id, export_id)
) STRICT;
CREATE INDEX exports_by_due ON exports (due_at);

ALTER TABLE jobs ADD COLUMN result_ttl_days INTEGER NOT NULL DEFAULT 14;
ALTER TABLE runs ADD COLUMN expires_at REAL;
ALTER TABLE runs ADD COLUMN sweep_at REAL;
CREATE INDEX runs_by_sweep ON runs (sweep_at) WHERE sweep_at IS NOT NULL;
