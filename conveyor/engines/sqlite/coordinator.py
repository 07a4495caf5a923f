"""SqliteCoordinator: keeps leases and status reports as rows (SPEC.md 4.6).

One transaction counts the live leases and inserts the new ones, so the cap holds exactly. Instants
are of the steady clock, which all processes of a machine share. In the tables `doors` are host
pools and `marks` are status reports.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from random import Random

from conveyor.domain import limits
from conveyor.domain.ids import JobId, LeaseId, RunId
from conveyor.engines.sqlite.database import Database
from conveyor.ports.clock import Clock
from conveyor.ports.coordinator import HostPool

_FORGET_DEAD = "DELETE FROM leases WHERE job_id = ? AND expires_at <= ?"
_COUNT = "SELECT count(*) FROM leases WHERE job_id = ?"
_TAKE = "INSERT INTO leases (lease_id, job_id, run_id, expires_at) VALUES (?, ?, ?, ?)"
_RENEW = "UPDATE leases SET expires_at = ? WHERE lease_id = ? AND expires_at > ?"
_RELEASE = "DELETE FROM leases WHERE lease_id = ?"
_NEXT_AT = "SELECT next_at FROM doors WHERE name = ?"
_STEP_THROUGH = """
INSERT INTO doors (name, next_at) VALUES (?, ?)
ON CONFLICT (name) DO UPDATE SET next_at = excluded.next_at
"""
_FORGET_HOSTS = "DELETE FROM doors WHERE next_at < ?"
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
        now = self._clock.steady()
        minted = [LeaseId(f"{self._random.getrandbits(128):032x}") for _ in range(count_max)]

        def op(connection: sqlite3.Connection) -> list[LeaseId]:
            free = _free_count(connection, job_id, cap, now)
            rows = [(lease_id, job_id, run_id, now + ttl_s) for lease_id in minted[:free]]
            connection.executemany(_TAKE, rows)
            return minted[:free]

        return await self._database.write(op)

    async def acquire_hosts(
        self, pools: Sequence[HostPool], *, ttl_s: float
    ) -> list[LeaseId | None]:
        now = self._clock.steady()
        minted = [LeaseId(f"{self._random.getrandbits(128):032x}") for _ in pools]

        def op(connection: sqlite3.Connection) -> list[LeaseId | None]:
            # Rows whose next admission is long past restrict nothing. Without this the table would
            # keep a row for every host.
            connection.execute(_FORGET_HOSTS, (now - ttl_s,))
            return [
                lease_id if _enter(connection, pool, lease_id, now, ttl_s) else None
                for pool, lease_id in zip(pools, minted, strict=True)
            ]

        return await self._database.write(op)

    async def renew(self, lease_ids: Sequence[LeaseId], *, ttl_s: float) -> frozenset[LeaseId]:
        now = self._clock.steady()

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
        now = self._clock.steady()

        def op(connection: sqlite3.Connection) -> int:
            (live_count,) = connection.execute(_COUNT_LIVE, (run_id, now)).fetchone()
            return int(live_count)

        return await self._database.read_inline(op)

    async def put_status(self, owner: str, marks: Mapping[str, str], *, ttl_s: float) -> None:
        now = self._clock.steady()
        rows = [(subject, owner, text, now + ttl_s) for subject, text in marks.items()]

        def op(connection: sqlite3.Connection) -> None:
            connection.executemany(_MARK, rows)
            connection.execute(_FORGET_OLD_MARKS, (now,))

        await self._database.write(op)

    async def list_status(self, subject: str) -> list[str]:
        now = self._clock.steady()

        def op(connection: sqlite3.Connection) -> list[str]:
            return [text for (text,) in connection.execute(_MARKS, (subject, now))]

        return await self._database.read_inline(op)


def _free_count(connection: sqlite3.Connection, pool: str, cap: int, now: float) -> int:
    # Ended leases are deleted first, so that the count needs no condition on the time.
    connection.execute(_FORGET_DEAD, (pool, now))
    (live_count,) = connection.execute(_COUNT, (pool,)).fetchone()
    return max(0, cap - int(live_count))


def _enter(
    connection: sqlite3.Connection, pool: HostPool, lease_id: LeaseId, now: float, ttl_s: float
) -> bool:
    """Acquires a lease of a host pool. The lease belongs to the pool and to no run."""
    (next_at,) = connection.execute(_NEXT_AT, (pool.name,)).fetchone() or (0.0,)
    if next_at > now + pool.spacing_s + limits.HOST_SLACK_S:
        # No admission with this spacing sets `next_at` so far ahead. The spacing was longer before,
        # or the row is from before a restart of the machine, when the steady clock showed larger
        # values.
        next_at = now
    if pool.spacing_s and now < next_at - limits.HOST_SLACK_S:
        return False
    if not _free_count(connection, pool.name, pool.cap, now):
        return False
    # Spacing and cap are both checked before either is used: a refused caller uses up nothing.
    connection.execute(_TAKE, (lease_id, pool.name, "", now + ttl_s))
    if pool.spacing_s:
        connection.execute(_STEP_THROUGH, (pool.name, max(next_at, now) + pool.spacing_s))
    return True
