"""Coordinator: shared permits that cap how much of a job is in flight
(SPEC.md 4.6, 4.8), and marks.

Leases save work and keep caps; they never guard truth. Forgetting every lease is harmless. Marks
are what processes let each other know: short, short-lived, and harmless to forget, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from conveyor.domain.ids import JobId, LeaseId, RunId


class HostPool(msgspec.Struct, frozen=True):
    """The way to one host for one job: at most `cap` behind it, one every `spacing_s` through it.

    Somebody late may be made up for within `HOST_SLACK_S`.
    """

    job_id: JobId
    host: str
    cap: int
    spacing_s: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.job_id}/{self.host}"


class Coordinator(Protocol):
    """Laws:

    - Live leases of a job never exceed the cap that they were acquired under.
    - An unrenewed lease ages out after its time with no one's help.
    - Only a live lease can be renewed; renewing answers those that were lost.
    - Releasing frees the place at once; releasing again, or a lost lease, is fine.
    - Jobs share nothing.
    - A mark stands until its time is over or its owner leaves another on the same subject.
    - Nobody passes a door beyond its cap, nor sooner than its spacing allows: in any T seconds at
      most 1 + (T + HOST_SLACK_S) / spacing_s.
    - Doors, and the leases of their jobs, share nothing. Who is refused at one has used up nothing.
    - Any method may raise Unavailable.
    """

    async def acquire(
        self, job_id: JobId, run_id: RunId, *, count_max: int, cap: int, ttl_s: float
    ) -> list[LeaseId]:
        """Takes up to `count_max` leases while the job stays within `cap`; never waits."""

    async def acquire_hosts(
        self, pools: Sequence[HostPool], *, ttl_s: float
    ) -> list[LeaseId | None]:
        """Goes through each door in turn, never waits: a lease, or None where it is shut."""

    async def renew(self, lease_ids: Sequence[LeaseId], *, ttl_s: float) -> frozenset[LeaseId]:
        """Gives leases a new life of `ttl_s`; answers those that had none left."""

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        """Gives leases back."""

    async def count(self, run_id: RunId) -> int:
        """How many live leases the run's work holds."""

    async def put_status(self, owner: str, marks: Mapping[str, str], *, ttl_s: float) -> None:
        """Leaves a text on each of these subjects; one that lives 0 seconds takes the last back."""

    async def list_status(self, subject: str) -> list[str]:
        """The live marks on a subject, one an owner, in the order of their owners."""
