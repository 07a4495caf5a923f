"""Mutants of open jobs and completion: too early, too late, never (SPEC.md 3.2)."""

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
from conveyor.simulation.swaps import part, swapping
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import totals_of
from conveyor.usecases.run.reconcile import SweepResult
from tests.mutants.mutant import Mutant

_FEW = 1


def _whether_open_or_not(add_batch: Any) -> Any:
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


def _with_lists_open(_: Any) -> Any:
    def mutated(run: Run, totals: Totals) -> bool:
        return run.last_batch_received and totals.done >= run.total

    return mutated


def _with_more_to_come(_: Any) -> Any:
    def mutated(run: Run, totals: Totals) -> bool:
        return run.open_batches == 0 and totals.done >= run.total

    return mutated


def _not_without_tasks(is_complete: Any) -> Any:
    def mutated(run: Run, totals: Totals) -> bool:
        return bool(is_complete(run, totals) and run.total)

    return mutated


def _idle_though_ingesting(seen_status: Any) -> Any:
    def mutated(run: Run, totals: Totals) -> Any:
        return seen_status(msgspec.structs.replace(run, open_batches=0), totals)

    return mutated


def _stops_and_refs_only(repair: Any) -> Any:
    async def mutated(env: Context, run: Run, repairs: SweepResult) -> bool:
        if run.stop_requested_at is not None:
            await repair(env, run, repairs)
        else:
            resend = part("conveyor.usecases.run.reconcile:_resend")
            depth = await env.queue.depth(run.run_id)
            repairs.resent += await resend(env, run, depth, await totals_of(env, run))
        return False

    return mutated


def _first_page_only(_: Any) -> Any:
    async def mutated(env: Context, drained: dict[RunId, Run] | None = None) -> SweepResult:
        repairs = SweepResult()
        after: RunId | None = None
        repair = part("conveyor.usecases.run.reconcile:_repair")
        for run in await env.store.find(RunsIn(statuses=RUN_LIVE, after=after, limit=_FEW)):
            await repair(env, run, repairs)
        return repairs

    return mutated


def _not_worth_a_look(_: Any) -> Any:
    def mutated(settled: Settled) -> bool:
        return False

    return mutated


_QUIET = ("site_", "call_", "killed_")
_LOST_ANSWERS = {
    "temper": "adding",
    "haste": 10.0,
    "think_s": 0.1,
    "disturb_s": NEVER_S,
    "rates": {fault.value: 0.0 for fault in Fault if fault.value.startswith(_QUIET)}
    | {"answer_lost": 0.02},
}
"""A client that closes an idle job and gets no answer leaves its end to the sweeper."""

_LOST_MESSAGES = {
    "temper": "restless",
    "haste": 10.0,
    "think_s": 5.0,
    "max_inflight": 1,
    "disturb_s": NEVER_S,
    "pessimism": FaultRates(sqs=SqsFaults(retention_s_max=RETENTION_S)),
}
"""Messages expire while a run is paused or slow, and the sweeper alone sends them again. A stop or
completion that was cut off is finished by queue discovery or by the caller's next try as well."""

MUTANTS = (
    Mutant(
        name="add_after_close",
        window=27,
        invariants=(23, 26),
        what="Tasks are added to a job that was closed a moment ago.",
        apply=swapping("conveyor.domain.submit.admission:add_batch", _whether_open_or_not),
        world={
            "temper": "adding",
            "haste": 10.0,
            "latency_s": 0.05,
            "safety_s": 60.0,
            "is_spared": True,
        },
    ),
    Mutant(
        name="completed_with_lists_open",
        window=28,
        invariants=(23,),
        what="A run is complete though one of its lists is still being ingested.",
        apply=swapping("conveyor.domain.lifecycle:is_complete", _with_lists_open),
    ),
    Mutant(
        name="completed_before_close",
        window=31,
        invariants=(23,),
        what="An open job's run is complete as soon as it has nothing to do.",
        apply=swapping("conveyor.domain.lifecycle:is_complete", _with_more_to_come),
    ),
    Mutant(
        name="empty_run_never_completes",
        window=30,
        invariants=(27,),
        what="A run without tasks waits for one to be settled.",
        apply=swapping("conveyor.domain.lifecycle:is_complete", _not_without_tasks),
    ),
    Mutant(
        name="pending_while_ingesting",
        window=32,
        invariants=(28,),
        what="A run shows itself idle while a list is being ingested.",
        apply=swapping("conveyor.schemas.views:displayed_status", _idle_though_ingesting),
    ),
    Mutant(
        name="last_settle_does_not_look",
        window=67,
        invariants=(27,),
        what="Whoever settles the last task leaves the completion to the sweeper.",
        apply=swapping("conveyor.domain.run.settlement:may_be_drained", _not_worth_a_look),
    ),
    Mutant(
        name="sweeper_does_not_look",
        window=29,
        invariants=(27,),
        what="A completion that a crash has cut off is not made up for.",
        apply=swapping("conveyor.usecases.run.reconcile:_repair", _stops_and_refs_only),
        world={**_LOST_ANSWERS, "think_s": 1.0, "max_inflight": 1, "safety_s": 300.0},
    ),
    Mutant(
        name="sweeper_sees_its_first_page",
        window=97,
        invariants=(20, 27),
        what="The sweeper looks at the first few runs and never at the others.",
        apply=swapping("conveyor.usecases.run.reconcile:sweep_runs", _first_page_only),
        engines=("aws",),
        world=_LOST_MESSAGES,
    ),
)
