-- Crawls, and the log of what each of their steps found and kept.
CREATE TABLE crawls (
    job_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    caller text COLLATE "C" NOT NULL,
    status text COLLATE "C" NOT NULL,
    url text NOT NULL,
    rules text NOT NULL,
    created_at double precision NOT NULL,
    updated_at double precision NOT NULL,
    due_at double precision,
    version bigint NOT NULL,
    steps bigint NOT NULL,
    read_to bigint NOT NULL,
    waiting bigint NOT NULL,
    pages bigint NOT NULL,
    fetched bigint NOT NULL,
    failed bigint NOT NULL,
    items bigint NOT NULL,
    duplicates bigint NOT NULL,
    hosts text NOT NULL,
    cut_task text,
    cut_at bigint NOT NULL,
    is_cut_off boolean NOT NULL,
    ended_by text,
    error_code text,
    error_detail text,
    finished_at double precision,
    PRIMARY KEY (job_id, run_id)
);
CREATE INDEX crawls_by_due ON crawls (due_at, job_id) WHERE due_at IS NOT NULL;

CREATE TABLE crawl_steps (
    job_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    number bigint NOT NULL,
    waiting text NOT NULL,
    items text NOT NULL,
    PRIMARY KEY (job_id, run_id, number)
);
