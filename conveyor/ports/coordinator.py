"""Coordination between processes: shared leases that limit the parallel work of a job (SPEC.md 4.6,
4.8), status texts, and signals (SPEC.md 4.13).

Leases save work and keep caps; they never protect correctness. Losing all leases is harmless.
Status texts inform other processes: they are short, short-lived, and harmless to lose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from conveyor.domain.ids import JobId, LeaseId, RunId


class HostPool(msgspec.Struct, frozen=True):
    """The pool of one host for one job: at most `cap` leases, and one start every `spacing_s`.

    Lateness may be made up for within `HOST_SLACK_S`.
    """

    job_id: JobId
    host: str
    cap: int
    # 0 means that starts are not spaced.
    spacing_s: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.job_id}/{self.host}"


class Coordinator(Protocol):
    """Laws:

    - Live leases of a job never exceed the cap under which they were acquired.
    - An unrenewed lease ages out after its time without any call.
    - Only a live lease can be renewed; `renew` returns those that were lost.
    - Releasing a lease frees its place at once; releasing it again, or releasing a lost lease,
      changes nothing.
    - Jobs share nothing.
    - A status text exists until its time is over or its owner puts another one on the same subject.
    - A host pool never exceeds its cap, nor its spacing: in any T seconds it grants at most
      1 + (T + HOST_SLACK_S) / spacing_s leases.
    - Host pools and the leases of their jobs share nothing. A refusal by one pool uses up nothing.
    - Any method may raise Unavailable.
    """

    async def acquire(
        self, job_id: JobId, run_id: RunId, *, count_max: int, cap: int, ttl_s: float
    ) -> list[LeaseId]:
        """Takes up to `count_max` leases while the job stays within `cap`; never waits."""

    async def acquire_hosts(
        self, pools: Sequence[HostPool], *, ttl_s: float
    ) -> list[LeaseId | None]:
        """Takes a lease from each pool in turn; never waits. Returns None for each pool without
        room. The cap and the spacing of this call apply, also if an earlier call had others."""

    async def renew(self, lease_ids: Sequence[LeaseId], *, ttl_s: float) -> frozenset[LeaseId]:
        """Renews leases for `ttl_s` from now. Returns those that had aged out."""

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        """Releases leases."""

    async def count(self, run_id: RunId) -> int:
        """Counts the live leases of the run."""

    async def put_status(self, owner: str, marks: Mapping[str, str], *, ttl_s: float) -> None:
        """Puts a text on each of these subjects. A text with a lifetime of 0 seconds withdraws the
        previous one."""

    async def list_status(self, subject: str) -> list[str]:
        """Returns the live texts of a subject, one per owner, in the order of the owners."""


# Signals inform the workers of a run that it changed, so that they need not poll. They only make a
# reaction faster: if one is lost, discovery finds the change by itself.


class TeardownResult(msgspec.Struct, frozen=True):
    """What a teardown released. `abandoned` counts calls that a remote gateway may still be
    processing."""

    # Leases that the run held when the teardown began.
    released: int = 0
    abandoned: int = 0
    complete: bool = True


class Signals(Protocol):
    """Laws:

    - Signalling a run that no worker has is harmless.
    - `teardown` returns when the run's local work has ended and released its claims and leases, or
      after `deadline_s` with a receipt that is not complete.
    """

    async def run_changed(self, job_id: JobId, run_id: RunId, tasks: int = 0) -> None:
        """The run is new, paused, resumed or has new tasks: workers should read it now. `tasks` is
        how many tasks a run with new tasks has; as many workers are needed."""

    async def batch_opened(self, job_id: JobId, run_id: RunId) -> None:
        """A batch of the run is open and waits to be ingested."""

    async def teardown(self, job_id: JobId, run_id: RunId, *, deadline_s: float) -> TeardownResult:
        """Ends all work on the run."""
