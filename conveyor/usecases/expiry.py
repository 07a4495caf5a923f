"""Expiry: results are kept for a while after their run has ended, then their bodies go (SPEC 5.8).

A result expires with the run that made it, also where a rerun has inherited it.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from conveyor.domain.changes import Change, Guard, RunKey, Update
from conveyor.domain.errors import ResultExpired
from conveyor.domain.ids import RunId
from conveyor.domain.model import Run, Task
from conveyor.domain.queries import DueExpiries
from conveyor.usecases.env import Env

_PAGE = 100


class Expiries(msgspec.Struct, frozen=True):
    """When the results that a run shows expire, by the run that made them, as seen `at`."""

    run_id: RunId
    instants: dict[RunId, float]
    at: float

    def instant_of(self, task: Task) -> float | None:
        return self.instants.get(task.source_run_id or self.run_id)

    def is_over(self, task: Task) -> bool:
        """Whether the task had a body, and has it no longer."""
        instant = self.instant_of(task)
        return task.result is not None and instant is not None and instant <= self.at


async def expiries_of(env: Env, run: Run, *, at: float | None = None) -> Expiries:
    made = [run]
    for source_run_id in run.source_run_ids:
        source = await env.store.read(RunKey(run.job_id, source_run_id))
        if source is not None:
            made.append(source)
    instants = {each.run_id: each.expires_at for each in made if each.expires_at is not None}
    return Expiries(run.run_id, instants, env.now() if at is None else at)


def refuse_expired(expiries: Expiries, task: Task) -> None:
    instant = expiries.instant_of(task)
    if expiries.is_over(task) and instant is not None:
        raise ResultExpired(f"The result was kept until {_shown(instant)}.")


def refuse_expired_run(env: Env, run: Run) -> None:
    if run.expires_at is not None and run.expires_at <= env.now():
        raise ResultExpired(f"The results of the run were kept until {_shown(run.expires_at)}.")


async def sweep_expired(env: Env) -> int:
    """Removes the bodies of runs whose time is over; their rows stay and tell of it."""
    due = await env.store.find(DueExpiries(due_by=env.now(), limit=_PAGE))
    for run in due:
        await env.blobs.delete_prefix(f"jobs/{run.job_id}/runs/{run.run_id}")
        await env.commit(_swept(run))
    return len(due)


def _swept(run: Run) -> Change:
    guard = Guard(equals=(("sweep_at", run.sweep_at),))
    return Change((Update(RunKey(run.job_id, run.run_id), guard, {"sweep_at": None}),))


def _shown(instant: float) -> str:
    return datetime.fromtimestamp(int(instant), UTC).isoformat().replace("+00:00", "Z")
