-- How many bytes of bodies a shard's tasks have stored: a quota counts them (SPEC.md 4.21).
ALTER TABLE stats ADD COLUMN stored_bytes INTEGER NOT NULL DEFAULT 0;
UPDATE stats SET stored_bytes = stored.size_bytes
FROM (
    SELECT run_id, shard, sum(json_extract(result, '$[1]')) AS size_bytes FROM tasks
    WHERE result IS NOT NULL AND source_run_id IS NULL
    GROUP BY run_id, shard
) AS stored
WHERE stored.run_id = stats.run_id AND stored.shard = stats.shard;
