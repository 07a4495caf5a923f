"""Mutants of stops, reruns, deletions and notices that are incomplete, repeated or undone
(SPEC.md 3, 4.16)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from conveyor.domain import webhook as webhooks
from conveyor.domain.changes import Applied, Change, Guard, Insert, NoticeKey, Update, Verdict
from conveyor.domain.ids import CallerId, NoticeId, Random, RunId
from conveyor.domain.lifecycle import CounterEvent
from conveyor.domain.model import (
    Batch,
    DeletionIntent,
    DeliveryAttempt,
    Job,
    JobStatus,
    Notice,
    Run,
    Task,
    Webhook,
)
from conveyor.ports.webhook_sender import WebhookSender
from conveyor.simulation.swaps import combine, original_of, swap, swap_constant
from conveyor.usecases.context import Context
from conveyor.usecases.run.reconcile import SweepResult
from conveyor.usecases.run.rerun import Rerun, RerunFilter
from tests.mutants.mutant import Mutant


def _keep_counters_open(_: Any) -> Any:
    def mutated(run: Run, event: CounterEvent) -> tuple[Update, ...]:
        return ()

    return mutated


def _skip_stopping_runs(repair: Any) -> Any:
    async def mutated(env: Context, run: Run, repairs: SweepResult) -> bool:
        return run.stop_requested_at is None and await repair(env, run, repairs)

    return mutated


def _only_stop_poller(consider: Any) -> Any:
    async def mutated(self: Any, state: Any, run: Run, *, is_signalled: bool = False) -> None:
        if run.stop_requested_at is None:
            await consider(self, state, run, is_signalled=is_signalled)
        else:
            await self._stop_poller(state, run.run_id)

    return mutated


def _ignore_live_run(new_run: Any) -> Any:
    def mutated(job: Job, run: Run, batches: Sequence[Batch], tasks: Sequence[Task]) -> Change:
        change: Change = new_run(job, run, batches, tasks)
        of_job, *rest = change.writes
        assert isinstance(of_job, Update)
        guard = Guard(status_in=of_job.guard.status_in)
        return Change((msgspec.structs.replace(of_job, guard=guard), *rest), change.effects)

    return mutated


def _rerun_from_rows(_: Any) -> Any:
    async def mutated(env: Context, job: Job, previous: Run, run_id: RunId) -> Rerun:
        from_rows = original_of("conveyor.usecases.run.rerun:_from_rows")
        rerun: Rerun = await from_rows(env, job, previous, RerunFilter(), run_id)
        return rerun

    return mutated


def _never_refuse(_: Any) -> Any:
    async def mutated(env: Context, run: Run, others: list[Run]) -> None:
        return None

    return mutated


def _use_one_pass(insert_intent: Any) -> Any:
    def mutated(job: Job, run_id: RunId | None, intent_id: str, now: float) -> Insert:
        insert: Insert = insert_intent(job, run_id, intent_id, now)
        assert isinstance(insert.row, DeletionIntent)
        row = msgspec.structs.replace(insert.row, passes_left=1)
        return msgspec.structs.replace(insert, row=row)

    return mutated


def _write_notice_later(commit: Any) -> Any:
    async def mutated(self: Any, change: Change) -> Verdict:
        writes = tuple(write for write in change.writes if not _is_notice(write))
        verdict: Verdict = await commit(self, msgspec.structs.replace(change, writes=writes))
        if isinstance(verdict, Applied):
            for notice in filter(_is_notice, change.writes):
                await self.commit(Change((notice,)))
        return verdict

    return mutated


def _is_notice(write: object) -> bool:
    return isinstance(write, Insert) and isinstance(write.key, NoticeKey)


def _give_up_after_failure(_: Any) -> Any:
    def mutated(
        notice: Notice,
        attempt: DeliveryAttempt,
        *,
        retry_after_s: float | None,
        now: float,
        random: Random,
    ) -> Change:
        return webhooks.record_receiver_gone(notice, attempt)

    return mutated


def _rename_event(post: Any) -> Any:
    async def mutated(
        env: Context, notifier: WebhookSender, notice: Notice, webhook: Webhook, caller: CallerId
    ) -> Any:
        renamed = NoticeId(f"{notice.notice_id}{notice.claim}")
        notice = msgspec.structs.replace(notice, notice_id=renamed)
        return await post(env, notifier, notice, webhook, caller)

    return mutated


def _record_before_post(post: Any) -> Any:
    async def mutated(
        env: Context, notifier: WebhookSender, notice: Notice, webhook: Webhook, caller: CallerId
    ) -> Any:
        current = await env.store.read(NoticeKey(notice.notice_id))
        if current is not None:
            await env.commit(
                webhooks.record_delivered(current, DeliveryAttempt(env.now(), 0.0, 204))
            )
        return await post(env, notifier, notice, webhook, caller)

    return mutated


MUTANTS = (
    Mutant(
        name="gates_left_open",
        window=68,
        invariants=(24, 34),
        what="A stop or deletion does not close the counters, so settles continue after it.",
        apply=swap("conveyor.domain.run.termination:_change_counters", _keep_counters_open),
    ),
    Mutant(
        name="half_stops_stay",
        window=68,
        invariants=(27,),
        what="A stop whose caller was lost is never finished.",
        apply=combine(
            swap("conveyor.usecases.run.reconcile:_repair", _skip_stopping_runs),
            swap("actors.queue_discovery:QueueDiscovery._reconcile_run", _only_stop_poller),
        ),
        world={"client_profile": "restless", "rates": {"answer_lost": 0.05}},
    ),
    Mutant(
        name="two_live_runs",
        window=70,
        invariants=(25,),
        what="A rerun starts while another run of the job is live.",
        apply=swap("conveyor.domain.submit.admission:new_run", _ignore_live_run),
        world={
            "client_profile": "restless",
            "client_speed": 10.0,
            "latency_s": 0.05,
            "safety_s": 60.0,
            "is_fault_free": True,
        },
    ),
    Mutant(
        name="rerun_of_what_was_ingested",
        window=71,
        invariants=(35,),
        what="A rerun of a run with an incomplete ingest contains only the ingested tasks.",
        apply=swap("conveyor.usecases.run.rerun:_from_sources", _rerun_from_rows),
        world={
            "client_profile": "restless",
            "sync_tasks_max": 5,
            "chunk_tasks": 1,
            "latency_s": 0.05,
            "is_fault_free": True,
        },
    ),
    Mutant(
        name="ancestors_deleted",
        window=12,
        invariants=(18,),
        what="A run is deleted although another run shows results of it.",
        apply=swap("conveyor.usecases.run.runs:_refuse_if_needed", _never_refuse),
        world={
            "client_profile": "tidy",
            "client_speed": 10.0,
            "think_s": 0.1,
            "safety_s": 60.0,
            "is_fault_free": True,
        },
    ),
    Mutant(
        name="one_scrub_only",
        window=77,
        invariants=(33,),
        what="Bodies and rows that a worker stores after the first deletion pass stay.",
        apply=swap("conveyor.domain.run.termination:_insert_intent", _use_one_pass),
        world={
            "client_profile": "tidy",
            "client_speed": 10.0,
            "workers_count": 2,
            "think_s": 5.0,
            "poll_s": 5.0,
        },
    ),
    Mutant(
        name="deleted_jobs_shown",
        window=81,
        invariants=(32,),
        what="A deleted job can be read until its row is gone.",
        apply=swap_constant("conveyor.usecases.lookup:JOB_VISIBLE", frozenset(JobStatus)),
        world={"client_profile": "tidy"},
    ),
    Mutant(
        name="notice_after_flip",
        window=66,
        invariants=(41,),
        what="The notice of a run's end is written after the end, not in the same commit.",
        apply=swap("conveyor.usecases.context:Context.commit_with_events", _write_notice_later),
    ),
    Mutant(
        name="webhook_tried_once",
        window=103,
        invariants=(41,),
        what="A failed delivery is not retried.",
        apply=swap("conveyor.domain.webhook:record_failed", _give_up_after_failure),
    ),
    Mutant(
        name="webhook_id_of_each_try",
        window=101,
        invariants=(42,),
        what="Each attempt at a delivery has another event id.",
        apply=swap("conveyor.usecases.webhook:_post", _rename_event),
    ),
    Mutant(
        name="webhook_recorded_first",
        window=101,
        invariants=(41,),
        what="A delivery is recorded before it is made.",
        apply=swap("conveyor.usecases.webhook:_post", _record_before_post),
    ),
)
