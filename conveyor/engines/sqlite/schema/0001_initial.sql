-- The first layout: a table per kind of row, a column per field, composite fields as JSON text.
-- Migrations run in order, each in one transaction; user_version holds the last one's number.

CREATE TABLE jobs (
    job_id TEXT PRIMARY KEY,
    caller TEXT NOT NULL,
    status TEXT NOT NULL,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    format TEXT NOT NULL,
    params TEXT NOT NULL,
    headers_sealed TEXT,
    auth_sealed TEXT,
    external_id TEXT,
    name TEXT,
    metadata TEXT,
    webhook TEXT,
    max_inflight INTEGER NOT NULL,
    max_attempts INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    shard_count INTEGER NOT NULL,
    runs_count INTEGER NOT NULL,
    latest_run_id TEXT,
    active_run_id TEXT
) STRICT;
CREATE INDEX jobs_by_caller ON jobs (caller, job_id);

CREATE TABLE runs (
    job_id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    caller TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    status TEXT NOT NULL,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    shard_count INTEGER NOT NULL,
    pause_state TEXT NOT NULL,
    planned INTEGER NOT NULL,
    total INTEGER NOT NULL,
    open_batches INTEGER NOT NULL,
    batches_seq INTEGER NOT NULL,
    last_batch_received INTEGER NOT NULL,
    ingest_status TEXT,
    stop_requested_at REAL,
    stop_reason TEXT,
    failure_reason TEXT,
    failure_detail TEXT,
    rerun_of TEXT,
    retried INTEGER NOT NULL,
    source_run_ids TEXT NOT NULL,
    ended_at REAL,
    PRIMARY KEY (job_id, run_id)
) STRICT;
CREATE INDEX runs_by_sequence ON runs (job_id, sequence);
CREATE INDEX runs_by_status ON runs (status, run_id);

CREATE TABLE batches (
    job_id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    batch_id TEXT NOT NULL,
    status TEXT NOT NULL,
    total INTEGER NOT NULL,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    source TEXT,
    epoch INTEGER NOT NULL,
    done INTEGER NOT NULL,
    cursor TEXT,
    failures INTEGER NOT NULL,
    source_run_ids TEXT NOT NULL,
    PRIMARY KEY (job_id, run_id, batch_id)
) STRICT;
CREATE INDEX batches_by_status ON batches (status, updated_at);

CREATE TABLE stats (
    job_id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    shard INTEGER NOT NULL,
    status TEXT NOT NULL,
    admitted INTEGER NOT NULL,
    done INTEGER NOT NULL,
    successful INTEGER NOT NULL,
    failed INTEGER NOT NULL,
    auth_failed INTEGER NOT NULL,
    blocked INTEGER NOT NULL,
    bad_target INTEGER NOT NULL,
    rate_limited INTEGER NOT NULL,
    timeout INTEGER NOT NULL,
    gateway_error INTEGER NOT NULL,
    other INTEGER NOT NULL,
    credits INTEGER NOT NULL,
    cost_micros INTEGER NOT NULL,
    PRIMARY KEY (job_id, run_id, shard)
) STRICT, WITHOUT ROWID;

-- Kept in the order of insertion: neighbours in a list are claimed and settled together, and so
-- touch the same pages. By id they are found through the index.
CREATE TABLE tasks (
    run_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    shard INTEGER NOT NULL,
    batch_id TEXT NOT NULL,
    "index" INTEGER NOT NULL,
    url TEXT NOT NULL,
    status TEXT NOT NULL,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    method TEXT NOT NULL,
    external_id TEXT,
    metadata TEXT,
    params TEXT,
    sealed TEXT,
    claim INTEGER NOT NULL,
    claim_until REAL NOT NULL,
    attempts INTEGER NOT NULL,
    handed_back INTEGER NOT NULL,
    started_at REAL,
    result TEXT,
    problem TEXT,
    reason TEXT,
    history TEXT NOT NULL,
    credits INTEGER NOT NULL,
    cost_micros INTEGER NOT NULL,
    source_run_id TEXT
) STRICT;
CREATE UNIQUE INDEX tasks_by_id ON tasks (run_id, task_id);

CREATE TABLE key_records (
    key_id TEXT PRIMARY KEY,
    caller TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    subject TEXT NOT NULL,
    owner TEXT NOT NULL,
    claimed_until REAL NOT NULL,
    expires_at REAL NOT NULL,
    response_status INTEGER,
    response_body TEXT
) STRICT;
CREATE INDEX key_records_by_expiry ON key_records (expires_at);
CREATE INDEX key_records_unanswered ON key_records (claimed_until) WHERE response_status IS NULL;

CREATE TABLE notices (
    notice_id TEXT PRIMARY KEY,
    job_id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    event_type TEXT NOT NULL,
    status TEXT NOT NULL,
    occurred_at REAL NOT NULL,
    due_at REAL NOT NULL,
    payload TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    last_error TEXT
) STRICT;
CREATE INDEX notices_by_due ON notices (status, due_at);
CREATE INDEX notices_by_run ON notices (job_id, run_id);

CREATE TABLE scrubs (
    job_id TEXT NOT NULL,
    run_id TEXT,
    scrub_id TEXT PRIMARY KEY,
    shard_count INTEGER NOT NULL,
    due_at REAL NOT NULL,
    passes_left INTEGER NOT NULL
) STRICT;
CREATE INDEX scrubs_by_due ON scrubs (due_at);

-- A queue without a run is closed and waits for its messages to be swept. Ids are never used
-- twice, so neither is a receipt, which is made of a message's id and its count of receives.
CREATE TABLE queues (
    queue_id INTEGER PRIMARY KEY AUTOINCREMENT,
    run_id TEXT UNIQUE
) STRICT;

CREATE TABLE messages (
    message_id INTEGER PRIMARY KEY AUTOINCREMENT,
    queue_id INTEGER NOT NULL,
    job_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    shard INTEGER NOT NULL,
    visible_at REAL NOT NULL,
    in_hand INTEGER NOT NULL,
    receives INTEGER NOT NULL
) STRICT;
CREATE INDEX messages_by_age ON messages (queue_id, visible_at);

CREATE TABLE leases (
    lease_id TEXT PRIMARY KEY,
    job_id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    expires_at REAL NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX leases_by_job ON leases (job_id, expires_at);
CREATE INDEX leases_by_run ON leases (run_id, expires_at);
