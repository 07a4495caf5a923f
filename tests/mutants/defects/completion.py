"""Mutants of open jobs and of completion that is early, late or missing (SPEC.md 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from conveyor.domain.changes import ANY, Change, Update
from conveyor.domain.ids import RunId
from conveyor.domain.lifecycle import RUN_LIVE
from conveyor.domain.model import Batch, Job, Run, Task, Totals
from conveyor.domain.queries import RunsIn
from conveyor.domain.run.settlement import Settled
from conveyor.simulation.faults.faults import Fault
from conveyor.simulation.models.fault_rates import FaultRates, SqsFaults
from conveyor.simulation.options import RETENTION_S
from conveyor.simulation.profiles import NEVER_S
from conveyor.simulation.swaps import original_of, swap
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import totals_of
from conveyor.usecases.run.reconcile import SweepResult
from tests.mutants.mutant import Mutant

_FEW = 1


def _add_without_guards(add_batch: Any) -> Any:
    def mutated(
        job: Job, run: Run, batch: Batch, tasks: Sequence[Task], *, is_last: bool, now: float
    ) -> Change:
        change: Change = add_batch(job, run, batch, tasks, is_last=is_last, now=now)
        of_job, of_run, *rest = change.writes
        assert isinstance(of_job, Update)
        assert isinstance(of_run, Update)
        unguarded = [msgspec.structs.replace(write, guard=ANY) for write in (of_job, of_run)]
        return Change((*unguarded, *rest), change.effects)

    return mutated


def _ignore_open_batches(_: Any) -> Any:
    def mutated(run: Run, totals: Totals) -> bool:
        return run.last_batch_received and totals.done >= run.total

    return mutated


def _ignore_last_batch(_: Any) -> Any:
    def mutated(run: Run, totals: Totals) -> bool:
        return run.open_batches == 0 and totals.done >= run.total

    return mutated


def _require_tasks(is_complete: Any) -> Any:
    def mutated(run: Run, totals: Totals) -> bool:
        return bool(is_complete(run, totals) and run.total)

    return mutated


def _hide_open_batches(seen_status: Any) -> Any:
    def mutated(run: Run, totals: Totals) -> Any:
        return seen_status(msgspec.structs.replace(run, open_batches=0), totals)

    return mutated


def _repair_without_completion(repair: Any) -> Any:
    async def mutated(env: Context, run: Run, repairs: SweepResult) -> bool:
        if run.stop_requested_at is not None:
            await repair(env, run, repairs)
        else:
            resend = original_of("conveyor.usecases.run.reconcile:_resend")
            depth = await env.queue.depth(run.run_id)
            repairs.resent += await resend(env, run, depth, await totals_of(env, run))
        return False

    return mutated


def _sweep_first_page(_: Any) -> Any:
    async def mutated(env: Context, drained: dict[RunId, Run] | None = None) -> SweepResult:
        repairs = SweepResult()
        after: RunId | None = None
        repair = original_of("conveyor.usecases.run.reconcile:_repair")
        for run in await env.store.find(RunsIn(statuses=RUN_LIVE, after=after, limit=_FEW)):
            await repair(env, run, repairs)
        return repairs

    return mutated


def _never_drained(_: Any) -> Any:
    def mutated(settled: Settled) -> bool:
        return False

    return mutated


_QUIET = ("site_", "call_", "killed_")
_LOST_ANSWERS = {
    "client_profile": "adding",
    "client_speed": 10.0,
    "think_s": 0.1,
    "disturb_s": NEVER_S,
    "rates": {fault.value: 0.0 for fault in Fault if fault.value.startswith(_QUIET)}
    | {"answer_lost": 0.02},
}
"""If a client closes an idle job and gets no answer, the sweeper must complete it."""

_LOST_MESSAGES = {
    "client_profile": "restless",
    "client_speed": 10.0,
    "think_s": 5.0,
    "max_inflight": 1,
    "disturb_s": NEVER_S,
    "service_rates": FaultRates(sqs=SqsFaults(retention_s_max=RETENTION_S)),
}
"""Messages expire while a run is paused or slow, and only the sweeper sends them again. Queue
discovery and the caller's next attempt would finish an interrupted stop or completion as well."""

MUTANTS = (
    Mutant(
        name="add_after_close",
        window=27,
        invariants=(23, 26),
        what="Tasks are added to a job that has just been closed.",
        apply=swap("conveyor.domain.submit.admission:add_batch", _add_without_guards),
        world={
            "client_profile": "adding",
            "client_speed": 10.0,
            "latency_s": 0.05,
            "safety_s": 60.0,
            "is_fault_free": True,
        },
    ),
    Mutant(
        name="completed_with_lists_open",
        window=28,
        invariants=(23,),
        what="A run completes although one of its lists is still being ingested.",
        apply=swap("conveyor.domain.lifecycle:is_complete", _ignore_open_batches),
    ),
    Mutant(
        name="completed_before_close",
        window=31,
        invariants=(23,),
        what="The run of an open job completes as soon as it has no task left.",
        apply=swap("conveyor.domain.lifecycle:is_complete", _ignore_last_batch),
    ),
    Mutant(
        name="empty_run_never_completes",
        window=30,
        invariants=(27,),
        what="A run without tasks never completes, because no task is settled.",
        apply=swap("conveyor.domain.lifecycle:is_complete", _require_tasks),
    ),
    Mutant(
        name="pending_while_ingesting",
        window=32,
        invariants=(28,),
        what="A run is displayed as idle while a list is being ingested.",
        apply=swap("conveyor.schemas.views:displayed_status", _hide_open_batches),
    ),
    Mutant(
        name="last_settle_does_not_look",
        window=67,
        invariants=(27,),
        what="The settle of the last task leaves the completion to the sweeper.",
        apply=swap("conveyor.domain.run.settlement:may_be_drained", _never_drained),
    ),
    Mutant(
        name="sweeper_does_not_look",
        window=29,
        invariants=(27,),
        what="The sweeper does not repair a completion that a crash interrupted.",
        apply=swap("conveyor.usecases.run.reconcile:_repair", _repair_without_completion),
        world={**_LOST_ANSWERS, "think_s": 1.0, "max_inflight": 1, "safety_s": 300.0},
    ),
    Mutant(
        name="sweeper_sees_its_first_page",
        window=97,
        invariants=(20, 27),
        what="The sweeper reads the first page of runs and never the others.",
        apply=swap("conveyor.usecases.run.reconcile:sweep_runs", _sweep_first_page),
        engines=("aws",),
        world=_LOST_MESSAGES,
    ),
)
