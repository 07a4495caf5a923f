-- Tasks between two tries are counted; callers have a feed of events; processes leave marks.

ALTER TABLE stats ADD COLUMN retrying INTEGER NOT NULL DEFAULT 0;

-- Tried, not ended, and in nobody's hand.
UPDATE stats SET retrying = waiting.count
FROM (
    SELECT run_id, shard, count(*) AS count
    FROM tasks
    WHERE attempts > 0 AND claim_until = 0 AND result IS NULL AND problem IS NULL
    GROUP BY run_id, shard
) AS waiting
WHERE stats.run_id = waiting.run_id AND stats.shard = waiting.shard;

CREATE TABLE events (
    caller TEXT NOT NULL,
    event_id TEXT NOT NULL,
    event_type TEXT NOT NULL,
    occurred_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    data TEXT NOT NULL,
    job_id TEXT,
    run_id TEXT,
    seq INTEGER NOT NULL,
    PRIMARY KEY (caller, event_id)
) STRICT;
CREATE UNIQUE INDEX events_by_place ON events (caller, seq) WHERE seq > 0;
CREATE INDEX events_unplaced ON events (occurred_at) WHERE seq = 0;
CREATE INDEX events_by_run ON events (job_id, run_id);
CREATE INDEX events_by_expiry ON events (expires_at);

CREATE TABLE feeds (
    caller TEXT PRIMARY KEY,
    seq INTEGER NOT NULL
) STRICT;

CREATE TABLE marks (
    subject TEXT NOT NULL,
    owner TEXT NOT NULL,
    text TEXT NOT NULL,
    expires_at REAL NOT NULL,
    PRIMARY KEY (subject, owner)
) STRICT, WITHOUT ROWID;
