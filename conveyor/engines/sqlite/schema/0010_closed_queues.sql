-- The sweeper removes the queue of an ended run once, and remembers that it did.

ALTER TABLE runs ADD COLUMN queue_closed INTEGER NOT NULL DEFAULT 0;
