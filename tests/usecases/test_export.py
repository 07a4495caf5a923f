"""Exports: a file is published whole or not at all, and any process can finish it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterable
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import trio

from conveyor.domain import limits
from conveyor.domain.changes import Applied, ExportKey, JobKey
from conveyor.domain.errors import Conflict, InvalidArgument, NotFound, ResultExpired
from conveyor.domain.export import progress
from conveyor.domain.export_record import Export, ExportFormat, ExportOrder, ExportStatus
from conveyor.domain.ids import ExportId, RunId
from conveyor.domain.model import Run, Task, TaskStatus
from conveyor.ports.blobs import Blobs, Stored
from conveyor.ports.errors import BlobMissing, Unavailable
from conveyor.ports.gateway import Outcome, Scraped
from conveyor.sdk.downloads import verify_export
from conveyor.usecases import export as exports
from conveyor.usecases.context import Context
from conveyor.usecases.export import Exported, ExportOptions
from conveyor.usecases.run import reconcile, runs
from conveyor.usecases.run.rerun import rerun
from conveyor.usecases.submit import jobs
from tests.builders import CALLER, ManualClock
from tests.usecases.faults import Fault, FaultyBlobs, When, with_fault
from tests.usecases.world import MISS, OTHER_CALLER, rows_of, run_of, submit, work


def a_page(task: Task) -> Outcome:
    """Each page contains its own URL; every third one is missing."""
    if task.index % 3 == 2:
        return MISS
    return Scraped(status=200, content_type="text/html", body=f"page {task.index}".encode() * 50)


async def an_ended_run(env: Context, count: int = 7, *, days: int = 14) -> Run:
    accepted = await submit(env, count, result_ttl_days=days)
    await work(env, accepted.run, a_page)
    return await run_of(env, accepted.run)


async def start_export(env: Context, run: Run, kind: ExportFormat = ExportFormat.JSONL) -> Export:
    return await exports.start(env, CALLER, run.job_id, run.run_id, kind, export_id=env.new_id())


async def now_of(env: Context, export: Export) -> Export | None:
    return await env.store.read(progress.export_key(export))


async def file_of(env: Context, export: Export) -> bytes:
    current = await now_of(env, export)
    assert current is not None
    assert current.status is ExportStatus.COMPLETED
    assert current.key is not None
    async with aclosing(env.blobs.open(current.key)) as pieces:
        return b"".join([piece async for piece in pieces])


def lines_of(content: bytes) -> list[dict[str, object]]:
    return [msgspec.json.decode(line) for line in content.splitlines()]


async def process_all(env: Context, clock: ManualClock, *, rounds: int = 12) -> None:
    """Processes due exports as an exporter does, until none is due for a while."""
    for _ in range(rounds):
        for export in await exports.due(env, limit=10):
            await exports.process(env, export)
        clock.advance(limits.EXPORT_CLAIM_S + 1)


@pytest.mark.parametrize("kind", ExportFormat)
async def test_an_export_holds_each_ended_task_once(
    env: Context, tmp_path: Path, kind: ExportFormat
) -> None:
    run = await an_ended_run(env)
    export = await start_export(env, run, kind)

    (due_export,) = await exports.due(env, limit=10)
    outcome = await exports.process(env, due_export)

    assert outcome is Exported.COMPLETED
    current = await now_of(env, export)
    assert current is not None
    assert current.manifest is not None
    assert current.manifest.counts == {"successful": 5, "failed": 2}
    assert (current.done, current.total) == (7, 7)
    path = tmp_path / "export"
    path.write_bytes(await file_of(env, export))
    if kind is ExportFormat.CSV:
        (tmp_path / "export.manifest.json").write_bytes(msgspec.json.encode(current.manifest))
    assert verify_export(path) == current.manifest


@pytest.mark.parametrize("kind", ExportFormat)
async def test_an_export_in_list_order_has_the_tasks_as_they_were_submitted(
    env: Context, tmp_path: Path, kind: ExportFormat
) -> None:
    run = await an_ended_run(env, 23)
    export = await exports.start(
        env,
        CALLER,
        run.job_id,
        run.run_id,
        kind,
        ExportOptions(ExportOrder.LIST),
        export_id=env.new_id(),
    )

    assert await exports.process(env, export) is Exported.COMPLETED

    current = await now_of(env, export)
    assert current is not None
    assert current.manifest is not None
    path = tmp_path / "export"
    path.write_bytes(await file_of(env, export))
    if kind is ExportFormat.CSV:
        (tmp_path / "export.manifest.json").write_bytes(msgspec.json.encode(current.manifest))
    assert verify_export(path) == current.manifest
    assert (current.manifest.order, current.manifest.entries) == (ExportOrder.LIST, 23)
    if kind is ExportFormat.JSONL:
        *lines, _ = lines_of(await file_of(env, export))
        assert [line["index"] for line in lines] == list(range(23))


async def test_a_format_whose_library_is_missing_is_refused(
    env: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await an_ended_run(env)
    export = await start_export(env, run, ExportFormat.PARQUET)
    monkeypatch.setattr("conveyor.domain.export.parquet.is_available", lambda: False)

    with pytest.raises(InvalidArgument, match="conveyor"):
        await start_export(env, run, ExportFormat.PARQUET)
    assert await exports.process(env, export) is Exported.FAILED

    current = await now_of(env, export)
    assert current is not None
    assert current.error is not None
    assert "install conveyor[parquet] on every worker" in current.error


async def test_unfinished_tasks_are_left_out_and_counted_in_the_manifest(env: Context) -> None:
    accepted = await submit(env, 5)
    await work(env, accepted.run, a_page, count=2)
    await runs.stop(env, CALLER, accepted.job.job_id)
    export = await start_export(env, await run_of(env, accepted.run))

    await exports.process(env, export)

    *lines, last = lines_of(await file_of(env, export))
    ended = [row.task_id for row in await rows_of(env, accepted.run) if row.result or row.problem]
    assert [line["task_id"] for line in lines] == ended
    manifest = last["manifest"]
    assert isinstance(manifest, dict)
    assert (manifest["tasks"], manifest["entries"]) == (5, len(ended))


async def test_inherited_results_are_exported_with_the_run_they_came_from(env: Context) -> None:
    first = await an_ended_run(env, 6)
    again = await rerun(
        env,
        CALLER,
        first.job_id,
        retry=frozenset({TaskStatus.FAILED}),
        run_id=RunId(env.new_id()),
    )
    await work(env, again.run)
    export = await start_export(env, await run_of(env, again.run))

    await exports.process(env, export)

    *lines, _ = lines_of(await file_of(env, export))
    assert [line["status"] for line in lines] == ["successful"] * 6
    assert sorted(line.get("source_run_id") == first.run_id for line in lines) == (
        [False] * 2 + [True] * 4
    )
    assert all(line["body"] for line in lines)


@pytest.mark.parametrize("count", [0, 1, 499, 500, 501])
async def test_pages_and_groups_of_any_size_lose_no_task(env: Context, count: int) -> None:
    env = replace(env, config=replace(env.config, sync_tasks_max=1_000))
    accepted = await submit(env, count, is_open=count == 0)
    await work(env, accepted.run)
    if count == 0:
        await runs.stop(env, CALLER, accepted.job.job_id)
    export = await start_export(env, await run_of(env, accepted.run))

    await exports.process(env, export)

    *lines, _ = lines_of(await file_of(env, export))
    assert len({line["task_id"] for line in lines}) == len(lines) == count


async def test_a_live_run_cannot_be_exported(env: Context) -> None:
    accepted = await submit(env, 2)

    with pytest.raises(Conflict) as caught:
        await start_export(env, accepted.run)

    assert caught.value.code == "run_not_terminal"
    assert await exports.due(env, limit=10) == []


async def test_starting_an_export_again_under_the_same_id_returns_the_same_export(
    env: Context,
) -> None:
    run = await an_ended_run(env)
    export = await start_export(env, run)
    await exports.process(env, export)

    again = await exports.start(
        env, CALLER, run.job_id, run.run_id, ExportFormat.JSONL, export_id=export.export_id
    )

    assert again == await now_of(env, export)
    assert again.status is ExportStatus.COMPLETED


async def test_an_export_of_another_caller_is_not_found(env: Context) -> None:
    run = await an_ended_run(env)
    export = await start_export(env, run)

    for caller, export_id in (
        (OTHER_CALLER, export.export_id),
        (CALLER, env.new_id()),
        (CALLER, "x"),
    ):
        with pytest.raises(NotFound):
            await exports.own_export(env, caller, run.job_id, run.run_id, export_id)


@pytest.mark.parametrize("when", When)
@pytest.mark.parametrize("kind", [ExportFormat.ZIP, ExportFormat.JSONL])
async def test_an_export_that_fails_at_any_call_is_finished_and_never_shown_incomplete(
    env: Context, clock: ManualClock, when: When, kind: ExportFormat
) -> None:
    run = await an_ended_run(env)
    reference = await start_export(env, run, kind)
    await exports.process(env, reference)
    whole = lines_of(await file_of(env, reference)) if kind is ExportFormat.JSONL else []

    at = 0
    while True:
        at += 1
        fault = Fault(at, when)
        export = await start_export(env, run, kind)
        with suppress(Unavailable):
            await exports.process(with_fault(env, fault), export)
        seen = await now_of(env, export)
        assert seen is not None
        assert (seen.key is not None) == (seen.status is ExportStatus.COMPLETED)
        clock.advance(limits.EXPORT_CLAIM_S + 1)
        for due in await exports.due(env, limit=10):
            await exports.process(env, due)
        content = await file_of(env, export)
        if kind is ExportFormat.JSONL:
            assert lines_of(content)[:-1] == whole[:-1]
        if not fault.was_reached:
            break
    assert at > 10


async def test_an_exporter_that_was_overtaken_neither_publishes_nor_damages_the_other_file(
    env: Context, clock: ManualClock
) -> None:
    """The slow exporter has written its file when the fast one has already published its own."""
    run = await an_ended_run(env)
    export = await start_export(env, run)

    class Slow(FaultyBlobs):
        async def put_stream(self, key: str, pieces: AsyncIterable[bytes]) -> Stored:
            stored = await self.inner.put_stream(key, pieces)
            clock.advance(limits.EXPORT_CLAIM_S + 1)
            (due,) = await exports.due(env, limit=10)
            assert await exports.process(env, due) is Exported.COMPLETED
            return stored

    slow = replace(env, blobs=Slow(env.blobs, Fault(-1, When.BEFORE)))

    assert await exports.process(slow, export) is Exported.FENCED
    current = await now_of(env, export)
    assert current is not None
    assert current.epoch == 2
    assert lines_of(await file_of(env, export))


@pytest.mark.parametrize("step_s", [0.0, -86_400.0])
async def test_an_exporter_stops_when_another_has_claimed_its_export(
    env: Context, clock: ManualClock, step_s: float
) -> None:
    """Also if the clock was set back meanwhile."""
    run = await an_ended_run(env)
    export = await start_export(env, run)

    class Overtaken(FaultyBlobs):
        async def put_stream(self, key: str, pieces: AsyncIterable[bytes]) -> Stored:
            current = await now_of(env, export)
            assert current is not None
            verdict = await env.commit(progress.take_up(current, now=clock.now()))
            assert isinstance(verdict, Applied)
            clock.advance(10)
            clock.step(step_s)
            with pytest.raises(exports.OwnershipLost) as noticed:
                await self.inner.put_stream(key, pieces)
            raise noticed.value

    blobs: Blobs = Overtaken(env.blobs, Fault(-1, When.BEFORE))

    assert await exports.process(replace(env, blobs=blobs), export) is Exported.FENCED
    with pytest.raises(BlobMissing):
        await anext(env.blobs.open(_key_of_try(export, 1)))


def _key_of_try(export: Export, epoch: int) -> str:
    return f"jobs/{export.job_id}/exports/{export.run_id}/{export.export_id}/{epoch}/file"


async def test_a_missing_body_fails_the_export(env: Context, clock: ManualClock) -> None:
    run = await an_ended_run(env)
    export = await start_export(env, run)
    await env.blobs.delete_prefix(f"jobs/{run.job_id}/runs/{run.run_id}")

    await process_all(env, clock)

    current = await now_of(env, export)
    assert current is not None
    assert (current.status, current.key) == (ExportStatus.FAILED, None)
    assert current.error is not None
    named = re.fullmatch(r"the stored body of task (\w+) is missing", current.error)
    assert named is not None
    assert named[1] in {row.task_id for row in await rows_of(env, run)}


async def test_a_damaged_body_fails_the_export_at_once(env: Context) -> None:
    """A retry would find the same bytes."""
    run = await an_ended_run(env)
    for kind in (ExportFormat.JSONL, ExportFormat.ZIP, ExportFormat.WARC):
        export = await start_export(env, run, kind)
        (row,) = [row for row in await rows_of(env, run) if row.index == 1]
        assert row.result is not None
        await env.blobs.put(row.result.key, [b"another body"])

        outcome = await exports.process(env, export)

        current = await now_of(env, export)
        assert outcome is Exported.FAILED
        assert current is not None
        assert current.status is ExportStatus.FAILED
        assert current.error == f"the stored body of task {row.task_id} is damaged"


async def test_a_cancelled_exporter_releases_its_export_at_once(env: Context) -> None:
    run = await an_ended_run(env)
    export = await start_export(env, run)

    with trio.CancelScope() as scope:

        class Stopping(FaultyBlobs):
            async def put_stream(self, key: str, pieces: AsyncIterable[bytes]) -> Stored:
                scope.cancel()
                return await self.inner.put_stream(key, pieces)

        stopping = replace(env, blobs=Stopping(env.blobs, Fault(-1, When.BEFORE)))
        await exports.process(stopping, export)

    (due,) = await exports.due(env, limit=10)
    assert (due.failures, due.epoch) == (0, 1)
    assert await exports.process(env, due) is Exported.COMPLETED


async def test_an_expired_export_is_not_found_and_is_then_removed(
    env: Context, clock: ManualClock
) -> None:
    run = await an_ended_run(env)
    export = await start_export(env, run)
    await exports.process(env, export)
    key = _key_of_try(export, 1)

    clock.advance(limits.EXPORT_TTL_S)
    with pytest.raises(NotFound):
        await exports.own_export(env, CALLER, run.job_id, run.run_id, export.export_id)
    (due,) = await exports.due(env, limit=10)
    assert await exports.process(env, due) is Exported.REMOVED

    assert await now_of(env, export) is None
    with pytest.raises(BlobMissing):
        await anext(env.blobs.open(key))


async def test_deleting_a_run_deletes_its_exports_also_unfinished_ones(
    env: Context, clock: ManualClock
) -> None:
    run = await an_ended_run(env)
    first, waiting = await start_export(env, run), await start_export(env, run)
    await exports.process(env, first)

    await runs.delete_run(env, CALLER, run.job_id, run.run_id)
    await reconcile.delete_due(env)

    assert await exports.process(env, waiting) is Exported.FENCED
    assert [await now_of(env, export) for export in (first, waiting)] == [None, None]
    assert await env.blobs.delete_prefix(f"jobs/{run.job_id}/exports") == 0


async def test_an_export_cannot_be_inserted_under_a_deleted_job(env: Context) -> None:
    run = await an_ended_run(env)
    export = progress.new_export(run, ExportId(env.new_id()), ExportFormat.ZIP, now=env.now())
    await jobs.delete(env, CALLER, run.job_id)

    verdict = await env.commit(progress.ask(export))

    assert not isinstance(verdict, Applied)
    assert await env.store.read(JobKey(run.job_id)) is not None
    key = ExportKey(run.job_id, run.run_id, export.export_id)
    assert await env.store.read(key) is None


async def test_an_export_never_outlives_the_results_it_contains(
    env: Context, clock: ManualClock
) -> None:
    run = await an_ended_run(env, days=1)
    clock.advance(86_400 - 60)

    export = await start_export(env, run)

    assert export.expires_at == run.expires_at
    clock.advance(60)
    with pytest.raises(ResultExpired):
        await start_export(env, run)
