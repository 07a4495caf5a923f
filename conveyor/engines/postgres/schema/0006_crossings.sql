-- Changes over two stores that are not finished. Always empty here: the first store has them.
CREATE TABLE crossings (
    job_id text COLLATE "C" NOT NULL,
    token text NOT NULL,
    made_at double precision NOT NULL,
    writes text NOT NULL,
    PRIMARY KEY (job_id)
);
CREATE INDEX crossings_by_age ON crossings (made_at, job_id);
