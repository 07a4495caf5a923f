-- Crawls, and the log of what each of their steps found and kept.
CREATE TABLE crawls (
    job_id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    caller TEXT NOT NULL,
    status TEXT NOT NULL,
    url TEXT NOT NULL,
    rules TEXT NOT NULL,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    due_at REAL,
    version INTEGER NOT NULL,
    steps INTEGER NOT NULL,
    read_to INTEGER NOT NULL,
    waiting INTEGER NOT NULL,
    pages INTEGER NOT NULL,
    fetched INTEGER NOT NULL,
    failed INTEGER NOT NULL,
    items INTEGER NOT NULL,
    duplicates INTEGER NOT NULL,
    hosts TEXT NOT NULL,
    cut_task TEXT,
    cut_at INTEGER NOT NULL,
    is_cut_off INTEGER NOT NULL,
    ended_by TEXT,
    error_code TEXT,
    error_detail TEXT,
    finished_at REAL,
    PRIMARY KEY (job_id, run_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX crawls_by_due ON crawls (due_at) WHERE due_at IS NOT NULL;

CREATE TABLE crawl_steps (
    job_id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    waiting TEXT NOT NULL,
    items TEXT NOT NULL,
    PRIMARY KEY (job_id, run_id, number)
) STRICT;
