"""Recovery: what a new owner does with the hands of processes that are gone
(docs/engines.md, Ownership and recovery).

There is one owner at a time and it opens the data directory first, so whatever is in hand at that
moment is in nobody's hand. It goes through the messages in hand, never through all tasks.
"""

from __future__ import annotations

import sqlite3

from conveyor.domain import limits
from conveyor.domain.retry import RETRY_AFTER_S_MAX
from conveyor.engines.embedded.queue import sweep

# Messages go by the steady clock, which starts anew with the machine: what was left by an earlier
# start may seem to lie far ahead. What was never received has nothing to wait for, and nothing is
# put back for longer than the longest delay of a retry.

# In hand and still hidden. One whose time is past has come back by itself, and so will its claim.
_LAPSE_CLAIMS = """
UPDATE tasks SET claim_until = 0 WHERE claim_until > 0 AND rowid IN (
    SELECT tasks.rowid
    FROM queues
    CROSS JOIN messages USING (queue_id)
    CROSS JOIN tasks USING (run_id, task_id)
    WHERE messages.visible_at > :steady AND messages.in_hand = 1
)
"""
_SHOW_MESSAGES = """
UPDATE messages SET visible_at = :steady, in_hand = 0 WHERE message_id IN (
    SELECT message_id
    FROM queues
    CROSS JOIN messages USING (queue_id)
    WHERE visible_at > :steady
    AND (in_hand = 1 OR receives = 0 OR visible_at > :steady + :delay_s_max)
)
"""
_LAPSE_KEYS = """
UPDATE key_records SET claimed_until = 0 WHERE response_status IS NULL AND claimed_until > 0
"""

# One that is over is due when it expires; any other is due after the claim of who makes it.
_LAPSE_EXPORTS = """
UPDATE exports SET due_at = :now WHERE due_at > :now AND due_at < expires_at
"""
# Taken by one who is gone, or due before long anyway.
_LAPSE_SCRUBS = """
UPDATE scrubs SET due_at = :now WHERE due_at > :now AND due_at <= :now + :claim_s
"""


def recover(connection: sqlite3.Connection, *, now: float, steady: float) -> None:
    """`now` is the wall clock's, `steady` what the other clock shows."""
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(_LAPSE_CLAIMS, {"steady": steady})
    connection.execute(_SHOW_MESSAGES, {"steady": steady, "delay_s_max": RETRY_AFTER_S_MAX})
    connection.execute(_LAPSE_EXPORTS, {"now": now})
    connection.execute(_LAPSE_SCRUBS, {"now": now, "claim_s": limits.SCRUB_CLAIM_S})
    connection.execute(_LAPSE_KEYS)
    connection.execute("DELETE FROM leases")
    connection.execute("DELETE FROM marks")
    closed = connection.execute("SELECT queue_id FROM queues WHERE run_id IS NULL").fetchall()
    connection.execute("COMMIT")
    for (queue_id,) in closed:
        while sweep(connection, queue_id):
            pass
