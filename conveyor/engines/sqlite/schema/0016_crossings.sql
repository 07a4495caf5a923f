-- Changes over two stores that are not finished. Always empty here: this engine is one store.
CREATE TABLE crossings (
    job_id TEXT PRIMARY KEY,
    token TEXT NOT NULL,
    made_at REAL NOT NULL,
    writes TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX crossings_by_age ON crossings (made_at, job_id);
