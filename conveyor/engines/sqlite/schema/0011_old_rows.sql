-- Runs are looked at a second time when their rows have grown old. Those whose bodies went before there
-- was such a look are looked at once more.

UPDATE runs SET sweep_at = expires_at WHERE sweep_at IS NULL AND expires_at IS NOT NULL;
