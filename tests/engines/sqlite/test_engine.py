"""Recovery by a new owner after a crash: a copy of the live data directory is what a crash
leaves."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from random import Random

import pytest

from conveyor.domain import limits
from conveyor.domain.queries import DueExports, DueScrubs
from conveyor.engines.sqlite import EmbeddedEngine, open_engine
from conveyor.engines.sqlite import engine as recovery
from conveyor.engines.sqlite.database import migrate
from conveyor.ports.errors import QueueGone
from conveyor.ports.queue import Depth
from tests.builders import (
    JOB,
    OTHER_RUN,
    RUN,
    T0,
    ManualClock,
    a_deletion_intent,
    a_record,
    a_ref,
    a_task,
    an_export,
    keep,
    key_of,
)


@asynccontextmanager
async def _open(data_dir: Path, clock: ManualClock) -> AsyncIterator[EmbeddedEngine]:
    async with open_engine(data_dir, clock=clock, random=Random(1), owner="test") as engine:
        yield engine


@asynccontextmanager
async def _after_a_crash(data_dir: Path, clock: ManualClock) -> AsyncIterator[EmbeddedEngine]:
    """Must be entered while the engine on `data_dir` is still open and at rest."""
    image = data_dir.with_name("image")
    shutil.copytree(data_dir, image)
    async with _open(image, clock) as engine:
        yield engine


async def test_applied_changes_survive_a_crash(data_dir: Path, clock: ManualClock) -> None:
    async with _open(data_dir, clock) as engine:
        await keep(engine.store, a_task(1))

        async with _after_a_crash(data_dir, clock) as survivor:
            assert await survivor.store.read(key_of(a_task(1))) == a_task(1)


async def test_received_messages_are_visible_at_once_after_a_crash(
    data_dir: Path, clock: ManualClock
) -> None:
    async with _open(data_dir, clock) as engine:
        await engine.queue.open_run(RUN)
        await engine.queue.send([a_ref(1), a_ref(2)])
        await engine.queue.receive(RUN, count_max=1, visibility_s=60)
        await engine.queue.depth(
            RUN
        )  # This waits until the receive is durable, because a receive answers earlier.

        async with _after_a_crash(data_dir, clock) as survivor:
            received = await survivor.queue.receive(RUN, count_max=9, visibility_s=60)

    assert {message.ref: message.receives for message in received} == {a_ref(1): 2, a_ref(2): 1}


async def test_bounced_messages_keep_their_delay(data_dir: Path, clock: ManualClock) -> None:
    async with _open(data_dir, clock) as engine:
        await engine.queue.open_run(RUN)
        await engine.queue.send([a_ref(1)])
        received = await engine.queue.receive(RUN, count_max=1, visibility_s=60)
        await engine.queue.bounce(received, delay_s=30)

        async with _after_a_crash(data_dir, clock) as survivor:
            assert await survivor.queue.depth(RUN) == Depth(visible=0, hidden=1)
            clock.advance(30)
            assert await survivor.queue.depth(RUN) == Depth(visible=1, hidden=0)


async def test_claims_of_tasks_in_flight_lapse_and_no_others(
    data_dir: Path, clock: ManualClock
) -> None:
    until = clock.now() + 90
    in_hand, bounced = a_task(1, claim=4, claim_until=until), a_task(2, claim_until=until)
    async with _open(data_dir, clock) as engine:
        await keep(engine.store, in_hand, bounced)
        await engine.queue.open_run(RUN)
        await engine.queue.send([a_ref(1), a_ref(2)])
        received = await engine.queue.receive(RUN, count_max=2, visibility_s=60)
        await engine.queue.bounce(received[1:], delay_s=30)

        async with _after_a_crash(data_dir, clock) as survivor:
            freed = await survivor.store.read(key_of(in_hand))
            row = await survivor.store.read(key_of(bounced))

    assert freed == a_task(1, claim=4, claim_until=0)
    assert row == bounced


async def test_leases_do_not_survive_a_crash(data_dir: Path, clock: ManualClock) -> None:
    async with _open(data_dir, clock) as engine:
        await engine.coordinator.acquire(JOB, RUN, count_max=2, cap=2, ttl_s=30)

        async with _after_a_crash(data_dir, clock) as survivor:
            taken = await survivor.coordinator.acquire(JOB, RUN, count_max=2, cap=2, ttl_s=30)

    assert len(taken) == 2


async def test_unanswered_keys_can_be_taken_over_and_answered_keys_are_kept(
    data_dir: Path, clock: ManualClock
) -> None:
    unanswered = a_record("one")
    answered = a_record("two", response_status=201, response_body="{}")
    async with _open(data_dir, clock) as engine:
        await keep(engine.store, unanswered, answered)

        async with _after_a_crash(data_dir, clock) as survivor:
            assert await survivor.store.read(key_of(unanswered)) == a_record("one", claimed_until=0)
            assert await survivor.store.read(key_of(answered)) == answered


async def test_partly_written_bodies_are_removed(data_dir: Path, clock: ManualClock) -> None:
    async with _open(data_dir, clock) as engine:
        await engine.blobs.put("jobs/1/a/b", [b"whole"])
        (data_dir / "temp" / "1-1").write_bytes(b"ha")

        async with (
            _after_a_crash(data_dir, clock) as survivor,
            aclosing(survivor.blobs.open("jobs/1/a/b")) as pieces,
        ):
            assert [piece async for piece in pieces] == [b"whole"]

    assert list((data_dir.with_name("image") / "temp").iterdir()) == []


async def test_the_removal_of_a_queue_is_finished_after_a_crash(
    data_dir: Path, clock: ManualClock
) -> None:
    async with _open(data_dir, clock) as engine:
        for run_id in (RUN, OTHER_RUN):
            await engine.queue.open_run(run_id)
            await engine.queue.send([a_ref(1, run_id)])
        database = engine.queue._database
        detach = "UPDATE queues SET run_id = NULL WHERE run_id = ?"
        await database.write(lambda db: db.execute(detach, (RUN,)).rowcount)

        async with _after_a_crash(data_dir, clock) as survivor:
            with pytest.raises(QueueGone):
                await survivor.queue.receive(RUN, count_max=1, visibility_s=60)
            assert await survivor.queue.depth(OTHER_RUN) == Depth(visible=1, hidden=0)
            left = await survivor.queue._database.read(
                lambda db: db.execute("SELECT count(*) FROM messages").fetchone()
            )

    assert left == (1,)


async def test_exports_in_progress_are_due_at_once_and_finished_ones_are_not(
    data_dir: Path, clock: ManualClock
) -> None:
    in_hand = an_export(1, due_at=T0 + 60)
    over = an_export(2, due_at=T0 + 43_200)
    async with _open(data_dir, clock) as engine:
        await keep(engine.store, in_hand, over)

        async with _after_a_crash(data_dir, clock) as survivor:
            due = await survivor.store.find(DueExports(due_by=clock.now(), limit=10))

    assert [export.export_id for export in due] == [in_hand.export_id]


async def test_deletions_in_progress_are_due_at_once_and_later_ones_are_not(
    data_dir: Path, clock: ManualClock
) -> None:
    in_hand = a_deletion_intent(1, due_at=T0 + limits.DELETION_CLAIM_S)
    second = a_deletion_intent(2, due_at=T0 + limits.SECOND_DELETION_PASS_S)
    async with _open(data_dir, clock) as engine:
        await keep(engine.store, in_hand, second)

        async with _after_a_crash(data_dir, clock) as survivor:
            due = await survivor.store.find(DueScrubs(due_by=clock.now(), limit=10))

    assert [intent.scrub_id for intent in due] == [in_hand.scrub_id]


@pytest.mark.parametrize("sql", [recovery._LAPSE_CLAIMS, recovery._SHOW_MESSAGES])
def test_recovery_scans_only_the_queues_and_never_all_tasks(sql: str) -> None:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    migrate(connection)

    arguments = {"steady": 0.0, "delay_s_max": 0.0}
    plan = connection.execute(f"EXPLAIN QUERY PLAN {sql}", arguments).fetchall()

    scanned = [step.split()[1] for *_, step in plan if step.startswith("SCAN")]
    assert scanned == ["queues"]


async def test_closing_a_queue_finishes_an_earlier_close_that_failed(
    data_dir: Path, clock: ManualClock
) -> None:
    async with _open(data_dir, clock) as engine:
        await engine.queue.open_run(RUN)
        await engine.queue.send([a_ref(index) for index in range(3)])
        with sqlite3.connect(data_dir / "conveyor.db") as db:
            db.execute(
                "UPDATE queues SET run_id = NULL"
            )  # This is the state after a close that failed.

        await engine.queue.close_run(RUN)

        assert db.execute("SELECT count(*) FROM messages").fetchone() == (0,)
        assert db.execute("SELECT count(*) FROM queues").fetchone() == (0,)
        db.close()
