-- Budgets of runs, who has taken how much of them, and hosts that are fetched from one by one.

ALTER TABLE jobs ADD COLUMN budget TEXT;
ALTER TABLE jobs ADD COLUMN host_limits TEXT;
ALTER TABLE runs ADD COLUMN budget TEXT;

CREATE TABLE budgets (
    job_id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    unit TEXT NOT NULL,
    cap INTEGER NOT NULL,
    "left" INTEGER NOT NULL,
    PRIMARY KEY (job_id, run_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE shares (
    job_id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    holder TEXT NOT NULL,
    taken INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    PRIMARY KEY (job_id, run_id, holder)
) STRICT, WITHOUT ROWID;

-- When a door lets the next one in. Who is behind it has a lease in a pool of that name.
CREATE TABLE doors (
    name TEXT PRIMARY KEY,
    next_at REAL NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX doors_by_time ON doors (next_at);
