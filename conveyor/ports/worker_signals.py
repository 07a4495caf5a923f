"""Signals: tells the workers of a run that it changed, without waiting for them to look
(SPEC.md 4.13).

An optimisation with a receipt, never the truth: discovery finds out by itself.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from conveyor.domain.ids import JobId, RunId


class TeardownResult(msgspec.Struct, frozen=True):
    """What a teardown let go of. `abandoned` are calls that a remote gateway may still be doing."""

    released: int = 0
    abandoned: int = 0
    complete: bool = True


class Signals(Protocol):
    """Laws:

    - Signalling a run that nobody works on is fine.
    - `teardown` returns when the run's local work has ended and let go, or after `deadline_s`
      with a receipt that says it is not complete.
    """

    async def run_changed(self, job_id: JobId, run_id: RunId) -> None:
        """The run is new, paused, resumed or fed: look at it now."""

    async def batch_opened(self, job_id: JobId, run_id: RunId) -> None:
        """There is a batch to ingest."""

    async def teardown(self, job_id: JobId, run_id: RunId, *, deadline_s: float) -> TeardownResult:
        """End all work on the run."""
