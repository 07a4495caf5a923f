"""SqliteCoordinator: leases and marks as rows, counted and taken in one step (SPEC 6.7)."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from random import Random

from conveyor.domain.ids import JobId, LeaseId, RunId
from conveyor.engines.embedded.database import Database
from conveyor.ports.clock import Clock

_FORGET_DEAD = "DELETE FROM leases WHERE job_id = ? AND expires_at <= ?"
_COUNT = "SELECT count(*) FROM leases WHERE job_id = ?"
_TAKE = "INSERT INTO leases (lease_id, job_id, run_id, expires_at) VALUES (?, ?, ?, ?)"
_RENEW = "UPDATE leases SET expires_at = ? WHERE lease_id = ? AND expires_at > ?"
_RELEASE = "DELETE FROM leases WHERE lease_id = ?"
_COUNT_LIVE = "SELECT count(*) FROM leases WHERE run_id = ? AND expires_at > ?"

_FORGET_OLD_MARKS = "DELETE FROM marks WHERE expires_at <= ?"
_MARK = (
    "INSERT INTO marks (subject, owner, text, expires_at) VALUES (?, ?, ?, ?) "
    "ON CONFLICT DO UPDATE SET text = excluded.text, expires_at = excluded.expires_at"
)
_MARKS = "SELECT text FROM marks WHERE subject = ? AND expires_at > ? ORDER BY owner"


class SqliteCoordinator:
    def __init__(self, database: Database, clock: Clock, random: Random) -> None:
        self._database = database
        self._clock = clock
        self._random = random

    async def acquire(
        self, job_id: JobId, run_id: RunId, *, count_max: int, cap: int, ttl_s: float
    ) -> list[LeaseId]:
        now = self._clock.now()
        minted = [LeaseId(f"{self._random.getrandbits(128):032x}") for _ in range(count_max)]

        def op(connection: sqlite3.Connection) -> list[LeaseId]:
            connection.execute(_FORGET_DEAD, (job_id, now))
            (live_count,) = connection.execute(_COUNT, (job_id,)).fetchone()
            taken = minted[: max(0, cap - live_count)]
            rows = [(lease_id, job_id, run_id, now + ttl_s) for lease_id in taken]
            connection.executemany(_TAKE, rows)
            return taken

        return await self._database.write(op)

    async def renew(self, lease_ids: Sequence[LeaseId], *, ttl_s: float) -> frozenset[LeaseId]:
        now = self._clock.now()

        def op(connection: sqlite3.Connection) -> frozenset[LeaseId]:
            return frozenset(
                lease_id
                for lease_id in lease_ids
                if not connection.execute(_RENEW, (now + ttl_s, lease_id, now)).rowcount
            )

        return await self._database.write(op)

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        def op(connection: sqlite3.Connection) -> None:
            connection.executemany(_RELEASE, [(lease_id,) for lease_id in lease_ids])

        await self._database.write(op)

    async def count(self, run_id: RunId) -> int:
        now = self._clock.now()

        def op(connection: sqlite3.Connection) -> int:
            (live_count,) = connection.execute(_COUNT_LIVE, (run_id, now)).fetchone()
            return int(live_count)

        return await self._database.glance(op)

    async def leave_marks(self, owner: str, marks: Mapping[str, str], *, ttl_s: float) -> None:
        now = self._clock.now()
        rows = [(subject, owner, text, now + ttl_s) for subject, text in marks.items()]

        def op(connection: sqlite3.Connection) -> None:
            connection.executemany(_MARK, rows)
            connection.execute(_FORGET_OLD_MARKS, (now,))

        await self._database.write(op)

    async def marks_on(self, subject: str) -> list[str]:
        now = self._clock.now()

        def op(connection: sqlite3.Connection) -> list[str]:
            return [text for (text,) in connection.execute(_MARKS, (subject, now))]

        return await self._database.glance(op)
