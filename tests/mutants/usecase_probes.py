"""Probes of use cases and actors, which behave differently under a mutant, on the memory engine.

Each probe returns a value to compare; an error counts as a value too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import trio
from prometheus_client import CollectorRegistry

from actors.lease_heartbeater import LeaseHeartbeater, _Held
from actors.messages import Hold, Settle
from actors.poller.poller import RunPoller
from actors.queue_discovery import QueueDiscovery
from actors.runtime import Reply
from actors.shard_writer import ShardWriter
from actors.task_runner import TaskRunner
from conveyor.domain import limits
from conveyor.domain.changes import BatchKey, NoticeKey
from conveyor.domain.errors import Conflict
from conveyor.domain.export_record import ExportFormat
from conveyor.domain.ids import FIRST_BATCH, InputId, JobId, LeaseId, RunId
from conveyor.domain.model import (
    Batch,
    JobInput,
    ListFormat,
    ListSpec,
    Run,
    Task,
    TaskStatus,
    Webhook,
)
from conveyor.domain.run import termination
from conveyor.domain.run.settlement import Claimed
from conveyor.domain.run.wait_reason import WorkerReport
from conveyor.ports.webhook_sender import Delivered, NotDelivered
from conveyor.simulation.swaps import original_of
from conveyor.telemetry import make_metrics
from conveyor.usecases import export as exports
from conveyor.usecases import idempotency, lookup, webhook
from conveyor.usecases.context import Context
from conveyor.usecases.idempotency import StoredResponse
from conveyor.usecases.run import ingest, reconcile, rerun, results, run_progress, runs, tasks
from conveyor.usecases.submit import jobs, staging, upload
from conveyor.usecases.submit.jobs import Accepted, Submission
from tests.builders import (
    CALLER,
    a_batch,
    a_change,
    a_job,
    a_notice,
    a_run,
    a_stats,
    a_task,
    an_export,
    insert,
    keep,
    kept,
)
from tests.mutants.domain_probes import REQUEST, a_chunk
from tests.usecases.faults import Fault, When, with_fault
from tests.usecases.world import (
    LATER_FROM,
    OTHER_CALLER,
    PAGE,
    a_world,
    missing,
    run_of,
    submit,
    work,
)

HOOK = Webhook("https://example.com/hook")


def failing(env: Context, method: str) -> Context:
    return with_fault(env, Fault(at=1, when=When.BEFORE, only=method))


async def a_list_that_is_lost(env: Context) -> object:
    run_id, job_id = RunId(env.new_id()), JobId(env.new_id())
    return await staging.stage(failing(env, "put"), job_id, run_id, FIRST_BATCH, [])


async def a_refusal_for_now(env: Context) -> object:
    async def refuse(_: str) -> StoredResponse:
        raise Conflict("not now", retry_after_s=5)

    return await idempotency.run_once_per_key(
        env, REQUEST, refuse, lambda _: StoredResponse(409, "not now")
    )


async def a_chunk_of_a_zombie(env: Context) -> object:
    chunk = a_chunk()
    working = msgspec.structs.replace(chunk.tasks[0], status=TaskStatus.PROCESSING, claim=1)
    await keep(env.store, a_job(), a_run(), a_stats(), a_batch(epoch=5), working)
    await env.store.put_chunk(chunk)
    row = await kept(env.store, working)
    assert isinstance(row, Task)
    return row.status


async def _stream(content: bytes) -> AsyncIterator[bytes]:
    yield content


async def an_upload(env: Context) -> tuple[Accepted, Batch]:
    spec = ListSpec(ListFormat.TEXT)
    slot: JobInput = await upload.create(env, CALLER, spec, input_id=InputId(env.new_id()))
    await upload.fill(env, slot, _stream(b"https://example.com/a\n" * 5))
    request = Submission(input_id=slot.input_id)
    accepted = await jobs.submit(env, CALLER, request, job_id=JobId(env.new_id()))
    run = accepted.run
    batch = await env.store.read(BatchKey(run.job_id, run.run_id, FIRST_BATCH))
    assert batch is not None
    return accepted, batch


async def where_an_upload_is_read(env: Context) -> object:
    _, batch = await an_upload(env)
    return str(batch.source).partition("sources/")[1]


async def numbers_of_a_resumed_upload(env: Context) -> object:
    accepted, batch = await an_upload(env)
    batch = msgspec.structs.replace(batch, done=2)
    chunks = ingest._chunks(env, batch, accepted.run)
    return [task.index async for chunk in chunks for task in chunk.tasks]


async def lists_that_stalled(world_env: Context) -> object:
    await submit(world_env, LATER_FROM)
    return len(await reconcile.stalled_batches(world_env, idle_s=0))


async def a_list_given_up(env: Context) -> object:
    accepted = await submit(env, LATER_FROM)
    run = accepted.run
    (batch,) = await ingest.open_batches_of(env, run.job_id, run.run_id)
    await ingest.fail_batch(env, batch, "unreadable")
    return (await run_of(env, run)).stop_reason


async def a_closed_run_without_completion(env: Context) -> Run:
    accepted = await submit(env, 0, is_open=True)
    await env.commit_with_events(termination.close(accepted.job, accepted.run, now=env.now()))
    return accepted.run


async def swept(env: Context) -> object:
    waiting = [await a_closed_run_without_completion(env) for _ in range(4)]
    await reconcile.sweep_runs(env)
    return [(await run_of(env, run)).status for run in waiting]


async def a_half_stop(env: Context) -> object:
    accepted = await submit(env, 1)
    await env.commit(termination.request_stop(accepted.run, reason=None, now=env.now()))
    await reconcile.sweep_runs(env)
    return (await run_of(env, accepted.run)).status


async def scans(env: Context) -> object:
    seen: list[float] = []

    async def scan(_: object, since: float) -> None:
        seen.append(since)
        if len(seen) == 2:
            raise InterruptedError

    discovery: Any = SimpleNamespace(env=env, delta_s=1.0, resync_s=600.0, _scan=scan)
    state: Any = SimpleNamespace(addresses={}, crashes={})
    with suppress(InterruptedError):
        await QueueDiscovery._scan_forever(discovery, state)
    return seen


async def workers_long_after_a_death(env: Context) -> object:
    await run_progress.publish_presence(env, WorkerReport(1, 0, worker=env.process_id))
    clock: Any = env.clock
    clock.advance(2 * limits.PRESENCE_TTL_S)
    return await run_progress.live_workers(env)


async def a_poller_that_was_quiet(env: Context) -> object:
    accepted = await submit(env, 1)
    poller: Any = SimpleNamespace(env=env, job=accepted.job)
    state: Any = SimpleNamespace(
        run=accepted.run,
        permits=SimpleNamespace(inflight_count=1),
        quiet_until=trio.current_time(),
        returned_count=0,
    )
    return await RunPoller._stay_quiet(poller, state)


async def leases_under_a_cap_of_one(env: Context) -> object:
    job_id, run_id = JobId(env.new_id()), RunId(env.new_id())
    taken = [
        await env.coordinator.acquire(job_id, run_id, count_max=1, cap=1, ttl_s=30)
        for _ in range(2)
    ]
    return list(map(len, taken))


async def a_settle(env: Context) -> Settle:
    """Makes the settle of a claimed task and of its message."""
    accepted = await submit(env, 1)
    (message,) = await env.queue.receive(accepted.run.run_id, count_max=1, visibility_s=60)
    (claim,) = await tasks.claim(env, [message.ref])
    assert isinstance(claim, Claimed)
    result = await tasks.store_body(env, message.ref, claim, PAGE)
    verdict = tasks.judge_success(env, message.ref, claim.task, PAGE, result)
    return Settle(message.ref, claim.task, verdict.change, message, Reply())


def a_writer(env: Context) -> ShardWriter:
    return ShardWriter(env=env, metrics=make_metrics(CollectorRegistry()))


async def messages_left_by_a_commit(env: Context) -> object:
    settle = await a_settle(env)
    await a_writer(env)._commit([settle])
    return await env.queue.depth(settle.ref.run_id)


async def a_commit_that_is_not_answered(env: Context) -> object:
    settle = await a_settle(env)
    return await a_writer(failing(env, "commit"))._commit([settle])


async def a_message_put_back(env: Context) -> object:
    settle = await a_settle(env)

    async def nothing(*_: object, **__: object) -> None:
        await trio.lowlevel.checkpoint()

    runner: Any = SimpleNamespace(env=env, heartbeater=SimpleNamespace(ask=nothing))
    runner._bounce = lambda work, delay_s: TaskRunner._bounce(runner, work, delay_s)
    await TaskRunner._put_back(runner, SimpleNamespace(message=settle.message), 5.0)  # type: ignore[arg-type]
    return await env.queue.depth(settle.ref.run_id)


async def a_body(env: Context) -> object:
    settle = await a_settle(env)
    result = await tasks.store_body(env, settle.ref, Claimed(settle.task), PAGE)
    return result.key.rpartition(".")[2]


async def a_redelivered_message(env: Context) -> object:
    accepted = await submit(env, 1)
    (message,) = await env.queue.receive(accepted.run.run_id, count_max=1, visibility_s=60)
    again = msgspec.structs.replace(message, receives=2)
    (claim,) = await original_of("actors.poller.poller:take")(env, [again])
    return claim.task.claim


async def a_body_that_is_lost(env: Context) -> object:
    settle = await a_settle(env)
    return await tasks.store_body(failing(env, "add"), settle.ref, Claimed(settle.task), PAGE)


async def a_beat_without_a_claim(env: Context) -> object:
    settle = await a_settle(env)
    (lease_id,) = await env.coordinator.acquire(
        settle.ref.job_id, settle.ref.run_id, count_max=1, cap=1, ttl_s=limits.LEASE_TTL_S
    )
    assert settle.message is not None
    hold = Hold(
        LeaseId(lease_id),
        settle.message,
        msgspec.structs.replace(settle.task, claim=99),
        trio.CancelScope(),
    )
    heartbeater = LeaseHeartbeater(env=env)
    due = _Held(hold, trio.current_time() - heartbeater.due_s)
    return len((await heartbeater._beat([due])).receipts)


async def a_rerun_of_a_list_not_in(env: Context) -> object:
    accepted = await submit(env, LATER_FROM)
    await runs.stop(env, CALLER, accepted.job.job_id)
    again = await rerun.rerun(env, CALLER, accepted.job.job_id, run_id=RunId(env.new_id()))
    return again.run.planned


async def a_delete_of_an_ancestor(env: Context) -> object:
    accepted = await submit(env, 2)
    job_id, first = accepted.job.job_id, accepted.run
    await work(env, first, missing([0]))
    retry = frozenset({TaskStatus.FAILED})
    again = await rerun.rerun(env, CALLER, job_id, run_id=RunId(env.new_id()), retry=retry)
    await work(env, again.run)
    await runs.delete_run(env, CALLER, job_id, first.run_id)
    return "deleted"


async def a_deleted_job(env: Context) -> object:
    accepted = await submit(env, 1)
    await jobs.delete(env, CALLER, accepted.job.job_id)
    return await lookup.load_owned_job(env, CALLER, accepted.job.job_id)


async def commits_for_a_flip_with_a_notice(env: Context) -> object:
    counting = Fault(at=99, when=When.BEFORE, only="commit")
    change = a_change(insert(a_task()), insert(a_notice()))
    await with_fault(env, counting).commit_with_events(change)
    return counting.calls


async def what_a_receiver_hears(env: Context) -> object:
    deliveries: list[object] = []

    class Receiver:
        async def resolve(self, webhook: Webhook, partition: str) -> None:
            return None

        async def deliver(self, message: Any) -> Delivered | NotDelivered:
            notice = await env.store.read(NoticeKey(a_notice().notice_id))
            assert notice is not None
            deliveries.append((message.event_id, notice.status))
            return Delivered(204)

    await keep(env.store, a_notice())
    await webhook._post(env, Receiver(), a_notice(), HOOK, CALLER)
    return deliveries


async def tasks_on_all_pages(env: Context) -> object:
    accepted = await submit(env, 5)
    cursor, count = None, 0
    while True:
        page = await results.page(
            env, accepted.job, accepted.run, status="all", cursor=cursor, limit=2
        )
        count += len(page.tasks)
        cursor = page.next_cursor
        if cursor is None:
            return count


async def a_foreign_job(env: Context) -> object:
    accepted = await submit(env, 1)
    own_job = original_of("conveyor.api.results:load_owned_job")
    job = await own_job(env, OTHER_CALLER, accepted.job.job_id)
    return job.status


async def an_export_of_a_live_run(env: Context) -> object:
    run = (await submit(env, 1)).run
    kind = ExportFormat.JSONL
    export = await exports.start(env, CALLER, run.job_id, run.run_id, kind, export_id=env.new_id())
    return export.status


async def where_an_export_is_made(env: Context) -> object:
    await trio.lowlevel.checkpoint()
    return exports._own_prefix(an_export(epoch=3))


async def refs_sent_again(env: Context) -> object:
    run = (await submit(env, 3)).run
    await env.queue.close_run(run.run_id)
    return (await reconcile.sweep_runs(env)).resent


USE_CASE_PROBES: dict[str, Callable[[Context], Awaitable[object]]] = {
    "redelivery_needs_no_claim": a_redelivered_message,
    "lost_list_taken_for_stored": a_list_that_is_lost,
    "refusal_for_now_is_kept": a_refusal_for_now,
    "ingest_overwrites": a_chunk_of_a_zombie,
    "upload_not_pinned": where_an_upload_is_read,
    "resumed_list_renumbered": numbers_of_a_resumed_upload,
    "stalled_lists_stay": lists_that_stalled,
    "failed_ingest_leaves_run": a_list_given_up,
    "sweeper_does_not_look": swept,
    "sweeper_sees_its_first_page": swept,
    "half_stops_stay": a_half_stop,
    "discovery_looks_back_never": scans,
    "dead_workers_own_runs": workers_long_after_a_death,
    "quiet_until_the_end": a_poller_that_was_quiet,
    "leases_beyond_the_cap": leases_under_a_cap_of_one,
    "ack_before_settle": messages_left_by_a_commit,
    "unknown_settle_is_done": a_commit_that_is_not_answered,
    "retry_by_another_message": a_message_put_back,
    "body_named_by_task": a_body,
    "lost_body_taken_for_stored": a_body_that_is_lost,
    "beat_renews_lease_only": a_beat_without_a_claim,
    "rerun_of_what_was_ingested": a_rerun_of_a_list_not_in,
    "ancestors_deleted": a_delete_of_an_ancestor,
    "deleted_jobs_shown": a_deleted_job,
    "notice_after_flip": commits_for_a_flip_with_a_notice,
    "webhook_id_of_each_try": what_a_receiver_hears,
    "webhook_recorded_first": what_a_receiver_hears,
    "page_ends_one_too_far": tasks_on_all_pages,
    "foreign_jobs_shown": a_foreign_job,
    "live_run_exported": an_export_of_a_live_run,
    "exports_share_a_place": where_an_export_is_made,
    "lost_refs_stay_lost": refs_sent_again,
}
"""The probe of each mutant, by its name."""


async def outcome_of(probe: Callable[[Context], Awaitable[object]]) -> object:
    """Returns the result of the probe in a new world, or the error that it ended with."""
    try:
        return await probe(a_world().env)
    except Exception as error:  # noqa: BLE001 (every error is a result)
        return repr(error)
