"""The exporter: it processes requested exports, a few at once, and continues after crashes and
outages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from actors.exporter import Exporter
from conveyor.domain import limits
from conveyor.domain.changes import ExportKey
from conveyor.domain.export import progress
from conveyor.domain.export_record import Export, ExportFormat, ExportStatus
from conveyor.domain.ids import CallerId
from conveyor.domain.model import Run
from conveyor.ports.blobs import Blobs
from conveyor.usecases import export as exports
from conveyor.usecases.context import Context
from tests.actors.faults import Faults, faulty, has_crashed_actor
from tests.actors.world import CALLER, World, make_world, urls
from tests.builders import a_change, update


async def an_ended_run(world: World) -> Run:
    async with world.working():
        run, _ = await world.wait_for_end(await world.submit(urls(20)))
    return run


async def start_export(env: Context, run: Run) -> Export:
    kind = ExportFormat.ZIP
    return await exports.start(env, CALLER, run.job_id, run.run_id, kind, export_id=env.new_id())


async def status_of(env: Context, export: Export) -> ExportStatus | None:
    key = ExportKey(export.job_id, export.run_id, export.export_id)
    current = await env.store.read(key)
    return None if current is None else current.status


class SlowBlobs:
    """Blobs whose streams take some time; other calls are unchanged."""

    def __init__(self, blobs: Blobs, faults: Faults) -> None:
        self.put_stream = faulty(blobs, faults).put_stream
        self.put = blobs.put
        self.check_room = blobs.check_room
        self.add = blobs.add
        self.open = blobs.open
        self.copy = blobs.copy
        self.upload_url = blobs.upload_url
        self.download_url = blobs.download_url
        self.delete_prefix = blobs.delete_prefix


async def test_every_requested_export_is_made(autojump_clock: MockClock) -> None:
    world = make_world()
    run = await an_ended_run(world)

    async with world.working():
        asked_for = [await start_export(world.env, run) for _ in range(7)]
        await trio.sleep(10)

    statuses = [await status_of(world.env, export) for export in asked_for]
    assert statuses == [ExportStatus.COMPLETED] * 7


async def test_the_number_of_concurrent_exports_is_limited(autojump_clock: MockClock) -> None:
    world = make_world()
    run = await an_ended_run(world)
    for _ in range(6):
        await start_export(world.env, run)
    faults = Faults(latency_s={"put_stream": 5.0})
    env = replace(world.env, blobs=SlowBlobs(world.env.blobs, faults))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(Exporter(env=env, at_once_max=4).run)
        await trio.sleep(4)
        waiting = await exports.due(world.env, limit=10)
        await trio.sleep(30)
        nursery.cancel_scope.cancel()

    assert len(waiting) == 4
    assert await exports.due(world.env, limit=10) == []


async def test_the_export_of_a_lost_process_is_resumed_when_its_claim_lapses(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    run = await an_ended_run(world)
    export = await start_export(world.env, run)
    await world.env.commit(progress.take_up(export, now=world.env.now()))

    async with world.working():
        await trio.sleep(limits.EXPORT_CLAIM_S / 2)
        early = await status_of(world.env, export)
        await trio.sleep(limits.EXPORT_CLAIM_S)

    assert early is ExportStatus.RUNNING
    assert await status_of(world.env, export) is ExportStatus.COMPLETED


async def test_an_outage_delays_an_export_and_loses_nothing(autojump_clock: MockClock) -> None:
    world = make_world()
    run = await an_ended_run(world)
    export = await start_export(world.env, run)
    faults = Faults()
    env = replace(world.env, store=faulty(world.env.store, faults))

    async with trio.open_nursery() as nursery:
        for method in ("find", "commit", "read"):
            faults.before[method] += 2
            faults.after[method] += 2
        nursery.start_soon(Exporter(env=env).run)
        await trio.sleep(600)
        nursery.cancel_scope.cancel()

    assert await status_of(world.env, export) is ExportStatus.COMPLETED
    assert faults.fired["find"] == faults.fired["commit"] == 4


async def test_the_exporter_removes_expired_exports_and_results(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    run = await an_ended_run(world)
    export = await start_export(world.env, run)
    soon = world.env.now() + 30
    await world.env.commit(a_change(update(export, expires_at=soon)))
    await world.env.commit(a_change(update(run, expires_at=soon, sweep_at=soon)))

    async with world.working():
        await trio.sleep(20)
        status = await status_of(world.env, export)
        await trio.sleep(40)

    assert (status, await status_of(world.env, export)) == (ExportStatus.COMPLETED, None)
    assert await world.env.blobs.delete_prefix(f"jobs/{run.job_id}") == 0


async def test_large_exports_of_one_caller_do_not_delay_anothers(autojump_clock: MockClock) -> None:
    world = make_world()
    run = await an_ended_run(world)
    other = CallerId("other")
    async with world.working():
        theirs, _ = await world.wait_for_end(await world.submit(urls(3), caller=other))
    slow = replace(
        world.env, blobs=SlowBlobs(world.env.blobs, Faults(latency_s={"put_stream": 1_000.0}))
    )
    for _ in range(8):
        await start_export(slow, run)
    hoarder = Exporter(env=slow)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hoarder.run)
        await trio.sleep(5)
        export = await exports.start(
            slow, other, theirs.job_id, theirs.run_id, ExportFormat.ZIP, export_id=slow.new_id()
        )
        await trio.sleep(5)
        assert await status_of(slow, export) is ExportStatus.RUNNING
        nursery.cancel_scope.cancel()


async def test_an_export_that_crashes_the_exporter_fails_after_a_few_attempts(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    accepted = await world.submit(urls(3))

    async with world.working():
        await world.wait_for_end(accepted)
        tries = 0

        async def crash(*_: object) -> None:
            nonlocal tries
            tries += 1
            await trio.lowlevel.checkpoint()
            raise IndexError("a row that nobody thought of")

        monkeypatch.setattr(exports, "_make", crash)
        run_id = accepted.run.run_id
        export = await exports.start(
            world.env,
            CALLER,
            accepted.job.job_id,
            run_id,
            ExportFormat.CSV,
            export_id=world.env.new_id(),
        )
        await trio.sleep(900)

    record = await exports.own_export(
        world.env, CALLER, accepted.job.job_id, run_id, export.export_id
    )
    assert record.status is ExportStatus.FAILED
    assert tries < 20
    assert not has_crashed_actor(caplog)
