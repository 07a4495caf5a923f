-- What failed is asked for by itself, and is rarely much: tasks with a problem, in the order of pages.
-- It costs the others nothing. An index of all statuses would more than double a claim and a settle.

CREATE INDEX tasks_with_problem ON tasks (run_id, task_id) WHERE problem IS NOT NULL;
