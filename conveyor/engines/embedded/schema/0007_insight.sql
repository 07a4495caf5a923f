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
