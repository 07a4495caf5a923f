-- Tasks of state machines that wait for a run, and the channel by which a notice goes.

ALTER TABLE jobs ADD COLUMN task_token_sealed TEXT;
ALTER TABLE notices ADD COLUMN channel TEXT NOT NULL DEFAULT 'webhook';
