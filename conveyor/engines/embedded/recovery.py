"""Recovery: what a new owner does with the hands of processes that are gone (SPEC 5.6).

There is one owner at a time and it opens the data directory first, so whatever is in hand at that
moment is in nobody's hand. It goes through the messages in hand, never through all tasks.
"""

# ruff: noqa: S608 -- SQL text is put together from our own names; values are parameters.

from __future__ import annotations

import sqlite3

from conveyor.engines.embedded.queue import sweep

# In hand and still hidden. One whose time is past has come back by itself, and so will its claim.
_IN_HAND = """
FROM queues CROSS JOIN messages USING (queue_id)
WHERE visible_at > :now AND in_hand = 1
"""
_LAPSE_CLAIMS = f"""
UPDATE tasks SET claim_until = 0 WHERE claim_until > 0 AND rowid IN (
    SELECT tasks.rowid {_IN_HAND.replace("WHERE", "CROSS JOIN tasks USING (run_id, task_id) WHERE")}
)
"""
_SHOW_MESSAGES = f"""
UPDATE messages SET visible_at = :now, in_hand = 0 WHERE message_id IN (
    SELECT message_id {_IN_HAND}
)
"""
_LAPSE_KEYS = """
UPDATE key_records SET claimed_until = 0 WHERE response_status IS NULL AND claimed_until > 0
"""


def recover(connection: sqlite3.Connection, now: float) -> None:
    connection.execute("BEGIN IMMEDIATE")
    for sql in (_LAPSE_CLAIMS, _SHOW_MESSAGES):
        connection.execute(sql, {"now": now})
    connection.execute(_LAPSE_KEYS)
    connection.execute("DELETE FROM leases")
    closed = connection.execute("SELECT queue_id FROM queues WHERE run_id IS NULL").fetchall()
    connection.execute("COMMIT")
    for (queue_id,) in closed:
        while sweep(connection, queue_id):
            pass
