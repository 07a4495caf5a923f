-- A settled task is about twice as long as a waiting one. With so much room on its page, the new
-- version of the row stays there, and no index is written.
ALTER TABLE tasks SET (fillfactor = 45);
