-- The first layout: a table per kind of row, a column per field, composite fields as JSON text.
-- Scripts only add: columns with defaults, tables, indexes. Processes of the release before go on
-- working meanwhile. A statement ends with a semicolon at the end of an unindented line.
--
-- Ids compare byte by byte, whatever the collation of the database. Tables whose rows are changed
-- often leave room on each page, so that a change writes the same page and no index.

CREATE TABLE tasks (
    run_id text COLLATE "C" NOT NULL,
    task_id text COLLATE "C" NOT NULL,
    shard bigint NOT NULL,
    batch_id text COLLATE "C" NOT NULL,
    "index" bigint NOT NULL,
    url text NOT NULL,
    status text COLLATE "C" NOT NULL,
    created_at double precision NOT NULL,
    updated_at double precision NOT NULL,
    method text NOT NULL,
    external_id text COLLATE "C",
    metadata text,
    params text,
    sealed text,
    claim bigint NOT NULL,
    claim_until double precision NOT NULL,
    attempts bigint NOT NULL,
    handed_back bigint NOT NULL,
    started_at double precision,
    result text,
    problem text,
    reason text,
    history text NOT NULL,
    credits bigint NOT NULL,
    cost_micros bigint NOT NULL,
    source_run_id text COLLATE "C",
    PRIMARY KEY (run_id, task_id)
) WITH (fillfactor = 70);

CREATE TABLE stats (
    job_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    shard bigint NOT NULL,
    status text COLLATE "C" NOT NULL,
    admitted bigint NOT NULL,
    done bigint NOT NULL,
    successful bigint NOT NULL,
    failed bigint NOT NULL,
    auth_failed bigint NOT NULL,
    blocked bigint NOT NULL,
    bad_target bigint NOT NULL,
    rate_limited bigint NOT NULL,
    timeout bigint NOT NULL,
    gateway_error bigint NOT NULL,
    other bigint NOT NULL,
    credits bigint NOT NULL,
    cost_micros bigint NOT NULL,
    retrying bigint NOT NULL,
    stored_bytes bigint NOT NULL,
    PRIMARY KEY (job_id, run_id, shard)
) WITH (fillfactor = 20);

CREATE TABLE batches (
    job_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    batch_id text COLLATE "C" NOT NULL,
    status text COLLATE "C" NOT NULL,
    total bigint NOT NULL,
    created_at double precision NOT NULL,
    updated_at double precision NOT NULL,
    source text,
    epoch bigint NOT NULL,
    done bigint NOT NULL,
    cursor text,
    failures bigint NOT NULL,
    source_run_ids text NOT NULL,
    PRIMARY KEY (job_id, run_id, batch_id)
) WITH (fillfactor = 50);

CREATE TABLE notices (
    notice_id text COLLATE "C" NOT NULL,
    job_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    event_type text NOT NULL,
    status text COLLATE "C" NOT NULL,
    occurred_at double precision NOT NULL,
    due_at double precision NOT NULL,
    payload text NOT NULL,
    attempts bigint NOT NULL,
    last_error text,
    due_since double precision NOT NULL,
    claim bigint NOT NULL,
    tries text NOT NULL,
    channel text NOT NULL,
    PRIMARY KEY (notice_id)
);

CREATE TABLE exports (
    job_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    export_id text COLLATE "C" NOT NULL,
    format text NOT NULL,
    status text COLLATE "C" NOT NULL,
    created_at double precision NOT NULL,
    updated_at double precision NOT NULL,
    expires_at double precision NOT NULL,
    due_at double precision NOT NULL,
    total bigint NOT NULL,
    done bigint NOT NULL,
    epoch bigint NOT NULL,
    failures bigint NOT NULL,
    error text,
    key text,
    size_bytes bigint NOT NULL,
    sha256 text,
    manifest text,
    PRIMARY KEY (job_id, run_id, export_id)
);

CREATE TABLE budgets (
    job_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    unit text NOT NULL,
    cap bigint NOT NULL,
    "left" bigint NOT NULL,
    PRIMARY KEY (job_id, run_id)
) WITH (fillfactor = 20);

CREATE TABLE shares (
    job_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    holder text COLLATE "C" NOT NULL,
    taken bigint NOT NULL,
    seq bigint NOT NULL,
    PRIMARY KEY (job_id, run_id, holder)
) WITH (fillfactor = 20);

CREATE TABLE samples (
    job_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    minute bigint NOT NULL,
    at double precision NOT NULL,
    successful bigint NOT NULL,
    reasons text NOT NULL,
    stored_bytes bigint NOT NULL,
    credits bigint NOT NULL,
    cost_micros bigint NOT NULL,
    PRIMARY KEY (job_id, run_id, minute)
);

CREATE TABLE events (
    caller text COLLATE "C" NOT NULL,
    event_id text COLLATE "C" NOT NULL,
    event_type text NOT NULL,
    occurred_at double precision NOT NULL,
    expires_at double precision NOT NULL,
    data text NOT NULL,
    job_id text COLLATE "C",
    run_id text COLLATE "C",
    seq bigint NOT NULL,
    PRIMARY KEY (caller, event_id)
);

CREATE TABLE runs (
    job_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    caller text COLLATE "C" NOT NULL,
    sequence bigint NOT NULL,
    status text COLLATE "C" NOT NULL,
    created_at double precision NOT NULL,
    updated_at double precision NOT NULL,
    shard_count bigint NOT NULL,
    pause_state text NOT NULL,
    planned bigint NOT NULL,
    total bigint NOT NULL,
    open_batches bigint NOT NULL,
    batches_seq bigint NOT NULL,
    last_batch_received boolean NOT NULL,
    ingest_status text,
    stop_requested_at double precision,
    stop_reason text,
    failure_reason text,
    failure_detail text,
    rerun_of text,
    retried bigint NOT NULL,
    source_run_ids text NOT NULL,
    ended_at double precision,
    scheduled_for double precision,
    expires_at double precision,
    sweep_at double precision,
    budget text,
    queue_closed boolean NOT NULL,
    sampled_at double precision,
    sampled_done bigint NOT NULL,
    PRIMARY KEY (job_id, run_id)
) WITH (fillfactor = 50);

CREATE TABLE jobs (
    job_id text COLLATE "C" NOT NULL,
    caller text COLLATE "C" NOT NULL,
    status text COLLATE "C" NOT NULL,
    created_at double precision NOT NULL,
    updated_at double precision NOT NULL,
    format text NOT NULL,
    params text NOT NULL,
    headers_sealed text,
    auth_sealed text,
    external_id text COLLATE "C",
    name text,
    metadata text,
    webhook text,
    max_inflight bigint NOT NULL,
    max_attempts bigint NOT NULL,
    priority bigint NOT NULL,
    shard_count bigint NOT NULL,
    runs_count bigint NOT NULL,
    latest_run_id text COLLATE "C",
    active_run_id text COLLATE "C",
    type text NOT NULL,
    result_ttl_days bigint NOT NULL,
    budget text,
    host_limits text,
    task_token_sealed text,
    PRIMARY KEY (job_id)
) WITH (fillfactor = 70);

CREATE TABLE schedules (
    job_id text COLLATE "C" NOT NULL,
    status text COLLATE "C" NOT NULL,
    rule text NOT NULL,
    overlap text NOT NULL,
    source text NOT NULL,
    total bigint NOT NULL,
    created_at double precision NOT NULL,
    updated_at double precision NOT NULL,
    version bigint NOT NULL,
    next_fire_at double precision,
    last_fire_at double precision,
    skips text NOT NULL,
    PRIMARY KEY (job_id)
);

CREATE TABLE scrubs (
    job_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C",
    scrub_id text COLLATE "C" NOT NULL,
    shard_count bigint NOT NULL,
    due_at double precision NOT NULL,
    passes_left bigint NOT NULL,
    PRIMARY KEY (scrub_id)
);

CREATE TABLE key_records (
    key_id text COLLATE "C" NOT NULL,
    caller text COLLATE "C" NOT NULL,
    fingerprint text NOT NULL,
    subject text NOT NULL,
    owner text NOT NULL,
    claimed_until double precision NOT NULL,
    expires_at double precision NOT NULL,
    response_status bigint,
    response_body text,
    PRIMARY KEY (key_id)
);

CREATE TABLE job_inputs (
    input_id text COLLATE "C" NOT NULL,
    caller text COLLATE "C" NOT NULL,
    spec text NOT NULL,
    created_at double precision NOT NULL,
    expires_at double precision NOT NULL,
    PRIMARY KEY (input_id)
);

CREATE TABLE feeds (
    caller text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    PRIMARY KEY (caller)
);

CREATE TABLE signing_keys (
    caller text COLLATE "C" NOT NULL,
    active text NOT NULL,
    version bigint NOT NULL,
    candidate text,
    PRIMARY KEY (caller)
);

CREATE INDEX jobs_by_caller ON jobs (caller, job_id);
CREATE INDEX runs_by_sequence ON runs (job_id, sequence);
CREATE INDEX runs_by_status ON runs (status, run_id);
CREATE INDEX runs_by_sweep ON runs (sweep_at, run_id) WHERE sweep_at IS NOT NULL;
CREATE INDEX batches_by_status ON batches (status, updated_at);
CREATE INDEX notices_by_due ON notices (status, due_at);
CREATE INDEX notices_by_run ON notices (job_id, run_id, occurred_at, notice_id);
CREATE INDEX scrubs_by_due ON scrubs (due_at, scrub_id);
CREATE INDEX exports_by_due ON exports (due_at, export_id);
CREATE INDEX schedules_by_due ON schedules (status, next_fire_at, job_id);
CREATE INDEX job_inputs_by_expiry ON job_inputs (expires_at, input_id);
CREATE INDEX key_records_by_expiry ON key_records (expires_at);
CREATE UNIQUE INDEX events_by_place ON events (caller, seq) WHERE seq > 0;
CREATE INDEX events_unplaced ON events (occurred_at, event_id) WHERE seq = 0;
CREATE INDEX events_by_run ON events (job_id, run_id);
CREATE INDEX events_by_expiry ON events (expires_at);
-- What failed is asked for by itself, and is rarely much.
CREATE INDEX tasks_with_problem ON tasks (run_id, task_id) WHERE problem IS NOT NULL;

-- Long runs have a task table of their own, which inherits from `tasks`: deleting the run drops it.
CREATE TABLE task_tables (
    run_id text COLLATE "C" PRIMARY KEY,
    job_id text COLLATE "C" NOT NULL
);
CREATE INDEX task_tables_by_job ON task_tables (job_id);

-- A queue without a run is closed and waits for its messages to be removed. Ids are never used
-- twice, so neither is a receipt, which is made of a message's id and its count of receives.
CREATE TABLE queues (
    queue_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run_id text COLLATE "C" UNIQUE
);
CREATE INDEX queues_closed ON queues (queue_id) WHERE run_id IS NULL;

-- Every receive and every ack leaves a dead row, so this table is vacuumed by their number, however
-- long it is.
CREATE TABLE messages (
    message_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue_id bigint NOT NULL,
    job_id text COLLATE "C" NOT NULL,
    task_id text COLLATE "C" NOT NULL,
    shard bigint NOT NULL,
    visible_at double precision NOT NULL,
    receives bigint NOT NULL
) WITH (
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 20000,
    autovacuum_vacuum_insert_scale_factor = 1,
    autovacuum_vacuum_cost_delay = 0
);
CREATE INDEX messages_by_age ON messages (queue_id, visible_at, message_id);

-- Open batches that wait for one worker to ingest them.
CREATE TABLE control_messages (
    message_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL
);

-- A value that only the right secret can unseal.
CREATE TABLE secret_checks (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    sealed text NOT NULL
);

-- Leases, host pools and status reports may be lost, so they are written without a log.
CREATE UNLOGGED TABLE leases (
    lease_id text COLLATE "C" PRIMARY KEY,
    pool text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    expires_at double precision NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
CREATE INDEX leases_by_pool ON leases (pool);
CREATE INDEX leases_by_run ON leases (run_id);

CREATE UNLOGGED TABLE host_pools (
    name text COLLATE "C" PRIMARY KEY,
    next_at double precision NOT NULL
);
CREATE INDEX host_pools_by_time ON host_pools (next_at);

CREATE UNLOGGED TABLE status_reports (
    subject text COLLATE "C" NOT NULL,
    owner text COLLATE "C" NOT NULL,
    text text NOT NULL,
    expires_at double precision NOT NULL,
    PRIMARY KEY (subject, owner)
);
CREATE INDEX status_reports_by_expiry ON status_reports (expires_at);

-- Instants of messages, leases and reports are of the server's clock, which all processes share.
-- A caller may name another instant, as tests do.
CREATE FUNCTION instant(given double precision) RETURNS double precision
LANGUAGE sql VOLATILE
RETURN coalesce(given, extract(epoch FROM clock_timestamp())::double precision);

-- Takes up to so many leases of a pool, while it stays within its cap.
CREATE FUNCTION acquire_leases(
    of_pool text, of_run text, ids text[], cap bigint, ttl_s double precision,
    given double precision
) RETURNS SETOF text LANGUAGE plpgsql AS $$
    DECLARE
        free bigint;
        at double precision;
    BEGIN
        -- One caller per pool at a time: otherwise two would count the same free places.
        PERFORM pg_advisory_xact_lock(1129270903, hashtext(of_pool));
        at := instant(given);
        DELETE FROM leases WHERE pool = of_pool AND expires_at <= at;
        SELECT cap - count(*) INTO free FROM leases WHERE pool = of_pool;
        RETURN QUERY INSERT INTO leases (lease_id, pool, run_id, expires_at)
            SELECT id, of_pool, of_run, at + ttl_s
            FROM unnest(ids) AS id LIMIT greatest(free, 0) RETURNING lease_id;
    END
$$;

-- Takes one lease of a host's pool, if it has room and the time for the next start has come.
CREATE FUNCTION enter_host_pool(
    of_pool text, id text, cap bigint, spacing_s double precision, slack_s double precision,
    ttl_s double precision, given double precision
) RETURNS boolean LANGUAGE plpgsql AS $$
    DECLARE
        due double precision;
        at double precision;
    BEGIN
        PERFORM pg_advisory_xact_lock(1129270903, hashtext(of_pool));
        at := instant(given);
        SELECT next_at INTO due FROM host_pools WHERE name = of_pool;
        -- A start further ahead than this spacing allows was set under a longer spacing.
        IF due IS NULL OR due > at + spacing_s + slack_s THEN
            due := CASE WHEN due IS NULL THEN 0 ELSE at END;
        END IF;
        IF spacing_s > 0 AND at < due - slack_s THEN
            RETURN false;
        END IF;
        DELETE FROM leases WHERE pool = of_pool AND expires_at <= at;
        IF (SELECT count(*) FROM leases WHERE pool = of_pool) >= cap THEN
            RETURN false;
        END IF;
        INSERT INTO leases VALUES (id, of_pool, '', at + ttl_s);
        IF spacing_s > 0 THEN
            INSERT INTO host_pools VALUES (of_pool, greatest(due, at) + spacing_s)
                ON CONFLICT (name) DO UPDATE SET next_at = excluded.next_at;
        END IF;
        RETURN true;
    END
$$;
