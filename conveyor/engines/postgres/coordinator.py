"""PostgresCoordinator: keeps leases and status reports as rows (SPEC.md 4.6).

A function of the database counts the live leases and inserts the new ones, one caller per pool at a
time, so the cap holds exactly. The tables are unlogged: a crash of the server loses all leases,
which is harmless, and no write waits for the disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from conveyor.domain import limits
from conveyor.domain.ids import JobId, LeaseId, Random, RunId
from conveyor.engines.postgres.connection import Statement
from conveyor.engines.postgres.database import Database
from conveyor.engines.postgres.queue import Instant
from conveyor.ports.coordinator import HostPool

ACQUIRE = "SELECT acquire_leases($1, $2, $3::text[], $4, $5, $6)"
# All locks first and in one order, so that no two callers wait for each other.
LOCK_POOLS = """
SELECT pg_advisory_xact_lock(1129270903, number) FROM (
    SELECT DISTINCT hashtext(name) AS number FROM unnest($1::text[]) AS name ORDER BY number
) AS numbers
"""
ENTER = "SELECT enter_host_pool($1, $2, $3, $4, $5, $6, $7)"
# Rows whose next start is long past restrict nothing. Without this the table would keep a row for
# every host. Rows that another caller uses are left for the next time.
FORGET_HOSTS = """
DELETE FROM host_pools WHERE name = ANY(ARRAY(
    SELECT name FROM host_pools WHERE next_at < instant($2) - $1 ORDER BY next_at LIMIT 100
    FOR UPDATE SKIP LOCKED
))
"""
RENEW = """
UPDATE leases SET expires_at = instant($3) + $2
WHERE lease_id = ANY($1) AND expires_at > instant($3) RETURNING lease_id
"""
RELEASE = "DELETE FROM leases WHERE lease_id = ANY($1)"
COUNT = "SELECT count(*) FROM leases WHERE run_id = $1 AND expires_at > instant($2)"
REPORT = """
INSERT INTO status_reports (subject, owner, text, expires_at)
SELECT subject, $1, text, instant($5) + $4
FROM unnest($2::text[], $3::text[]) AS given (subject, text)
ON CONFLICT (subject, owner) DO UPDATE SET text = excluded.text, expires_at = excluded.expires_at
"""
FORGET_REPORTS = """
DELETE FROM status_reports WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM status_reports WHERE expires_at <= instant($1)
    ORDER BY expires_at LIMIT 1000 FOR UPDATE SKIP LOCKED
))
"""
REPORTS = """
SELECT text FROM status_reports WHERE subject = $1 AND expires_at > instant($2)
ORDER BY owner COLLATE "C"
"""


class PostgresCoordinator:
    def __init__(self, database: Database, random: Random, instant: Instant) -> None:
        self._database = database
        self._random = random
        self._instant = instant

    async def acquire(
        self, job_id: JobId, run_id: RunId, *, count_max: int, cap: int, ttl_s: float
    ) -> list[LeaseId]:
        minted = [self._mint() for _ in range(count_max)]
        params = (job_id, run_id, minted, cap, ttl_s, self._instant())
        answer = await self._database.write(Statement(ACQUIRE, params))
        return [LeaseId(lease_id) for (lease_id,) in answer.rows]

    async def acquire_hosts(
        self, pools: Sequence[HostPool], *, ttl_s: float
    ) -> list[LeaseId | None]:
        now, names = self._instant(), [pool.name for pool in pools]
        minted = [self._mint() for _ in pools]
        entries = [
            Statement(
                ENTER,
                (
                    pool.name,
                    lease_id,
                    pool.cap,
                    float(pool.spacing_s),
                    limits.HOST_SLACK_S,
                    ttl_s,
                    now,
                ),
            )
            for pool, lease_id in zip(pools, minted, strict=True)
        ]
        await self._database.write(Statement(FORGET_HOSTS, (ttl_s, now)))
        _, *answers = await self._database.run(Statement(LOCK_POOLS, (names,)), *entries)
        return [
            lease_id if answer.rows[0][0] else None
            for lease_id, answer in zip(minted, answers, strict=True)
        ]

    async def renew(self, lease_ids: Sequence[LeaseId], *, ttl_s: float) -> frozenset[LeaseId]:
        params = (lease_ids, ttl_s, self._instant())
        answer = await self._database.write(Statement(RENEW, params))
        return frozenset(lease_ids) - {lease_id for (lease_id,) in answer.rows}

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        await self._database.write(Statement(RELEASE, (lease_ids,)))

    async def count(self, run_id: RunId) -> int:
        answer = await self._database.read(Statement(COUNT, (run_id, self._instant())))
        return int(answer.rows[0][0])

    async def put_status(self, owner: str, marks: Mapping[str, str], *, ttl_s: float) -> None:
        now = self._instant()
        params = (owner, list(marks), list(marks.values()), ttl_s, now)
        await self._database.run(Statement(REPORT, params), Statement(FORGET_REPORTS, (now,)))

    async def list_status(self, subject: str) -> list[str]:
        answer = await self._database.read(Statement(REPORTS, (subject, self._instant())))
        return [text for (text,) in answer.rows]

    def _mint(self) -> LeaseId:
        return LeaseId(f"{self._random.getrandbits(128):032x}")
