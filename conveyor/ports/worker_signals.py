"""Signals: informs the workers of a run that it changed, so that they need not poll (SPEC.md 4.13).

Signals only make a reaction faster. If one is lost, discovery finds the change by itself.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from conveyor.domain.ids import JobId, RunId


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

    async def run_changed(self, job_id: JobId, run_id: RunId) -> None:
        """The run is new, paused, resumed or has new tasks: workers should read it now."""

    async def batch_opened(self, job_id: JobId, run_id: RunId) -> None:
        """A batch of the run is open and waits to be ingested."""

    async def teardown(self, job_id: JobId, run_id: RunId, *, deadline_s: float) -> TeardownResult:
        """Ends all work on the run."""
