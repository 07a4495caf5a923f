"""Deliveries of export files: durable, repeated, encrypted, and bounded in time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec
import pytest

from conveyor.domain import limits
from conveyor.domain.export import progress
from conveyor.domain.export_record import Destination, Export, ExportFormat, ExportStatus
from conveyor.domain.webhook import RETRY_SCHEDULE_S
from conveyor.ports.errors import Unavailable
from conveyor.ports.export_sink import OutgoingFile
from conveyor.ports.webhook_sender import Delivered, NotDelivered
from conveyor.usecases import export as exports
from conveyor.usecases.context import Context
from conveyor.usecases.export import Exported, ExportOptions
from conveyor.usecases.submit import jobs
from tests.builders import CALLER, ManualClock
from tests.usecases.test_export import an_ended_run, file_of, now_of

SECRET = "a-secret-key-of-the-caller"
PLACE = Destination("https://bucket.example/key?sig=private", secret_key=SECRET)
REFUSED = NotDelivered("http_4xx:403", 403)


@dataclass(slots=True)
class Sink:
    """Refuses its first files and accepts the others."""

    refusals: int = 0
    away: int = 0
    files: list[bytes] = field(default_factory=list)
    destinations: list[Destination] = field(default_factory=list)

    async def put(self, file: OutgoingFile) -> Delivered | NotDelivered:
        if self.away:
            self.away -= 1
            raise Unavailable("no descriptors")
        content = b"".join([piece async for piece in file.pieces])
        assert len(content) == file.size_bytes
        if self.refusals:
            self.refusals -= 1
            return REFUSED
        self.files.append(content)
        self.destinations.append(file.destination)
        return Delivered(200)


def with_sink(env: Context, sink: Sink) -> Context:
    return replace(env, export_sink=sink)


async def a_delivery(env: Context) -> Export:
    """An export whose file is complete and whose delivery is due."""
    run = await an_ended_run(env)
    export = await exports.start(
        env,
        CALLER,
        run.job_id,
        run.run_id,
        ExportFormat.CSV,
        ExportOptions(destination=PLACE),
        export_id=env.new_id(),
    )
    assert await exports.process(env, export) is Exported.DEFERRED
    return await current(env, export)


async def current(env: Context, export: Export) -> Export:
    row = await now_of(env, export)
    assert row is not None
    return row


async def test_a_file_is_put_to_its_destination_when_it_is_complete(env: Context) -> None:
    sink = Sink()
    env = with_sink(env, sink)
    export = await a_delivery(env)
    assert export.status is ExportStatus.DELIVERING
    (due,) = await exports.due(env, limit=10)

    assert await exports.process(env, due) is Exported.COMPLETED

    export = await current(env, export)
    assert export.status is ExportStatus.COMPLETED
    assert export.due_at == export.expires_at
    assert sink.files == [await file_of(env, export)]
    assert sink.destinations == [PLACE]


async def test_secrets_are_stored_encrypted_and_deleted_after_the_delivery(env: Context) -> None:
    env = with_sink(env, Sink())
    export = await a_delivery(env)
    stored = msgspec.json.encode(export).decode()

    await exports.process(env, export)

    assert export.destination == "https://bucket.example/key"
    assert export.destination_sealed is not None
    assert SECRET not in stored
    assert "private" not in stored
    assert (await current(env, export)).destination_sealed is None


async def test_a_refused_delivery_is_repeated_with_growing_delays(
    env: Context, clock: ManualClock
) -> None:
    sink = Sink(refusals=3)
    env = with_sink(env, sink)
    export = await a_delivery(env)
    for delay_s in RETRY_SCHEDULE_S[:3]:
        assert await exports.process(env, export) is Exported.DEFERRED
        export = await current(env, export)
        assert export.error == "http_4xx:403"
        assert 0.8 * delay_s < export.due_at - env.now() < 1.2 * delay_s
        assert progress.pull_back(export, now=env.now()) is None
        clock.advance(1.2 * delay_s)

    assert await exports.process(env, export) is Exported.COMPLETED

    export = await current(env, export)
    assert (export.status, export.error) == (ExportStatus.COMPLETED, None)


async def test_a_delivery_is_given_up_when_the_export_expires(
    env: Context, clock: ManualClock
) -> None:
    env = with_sink(env, Sink(refusals=100))
    export = await a_delivery(env)
    while export.status is ExportStatus.DELIVERING:
        await exports.process(env, export)
        export = await current(env, export)
        clock.advance(max(0.0, export.due_at - env.now()))

    assert (export.status, export.error) == (ExportStatus.FAILED, "http_4xx:403")
    assert export.destination_sealed is None
    assert env.now() <= export.expires_at


async def test_an_outage_of_the_store_is_no_failed_delivery(
    env: Context, clock: ManualClock
) -> None:
    env = with_sink(env, Sink(away=2))
    export = await a_delivery(env)
    for _ in range(2):
        assert await exports.process(env, export) is Exported.DEFERRED
        export = await current(env, export)
        assert (export.failures, export.error) == (0, None)
        clock.advance(limits.EXPORT_CLAIM_S)

    assert await exports.process(env, export) is Exported.COMPLETED


async def test_only_one_of_two_exporters_records_the_delivery(env: Context) -> None:
    env = with_sink(env, Sink())
    export = await a_delivery(env)

    assert await exports.process(env, export) is Exported.COMPLETED
    assert await exports.process(env, export) is Exported.FENCED


async def test_a_damaged_file_is_not_delivered(env: Context) -> None:
    sink = Sink()
    env = with_sink(env, sink)
    export = await a_delivery(env)
    assert export.key is not None
    await env.blobs.delete_prefix(export.key.rpartition("/")[0])

    assert await exports.process(env, export) is Exported.FAILED

    assert sink.files == []
    error = (await current(env, export)).error
    assert error is not None
    assert "cannot be delivered" in error


async def test_nothing_is_delivered_for_a_deleted_job(env: Context) -> None:
    sink = Sink()
    env = with_sink(env, sink)
    export = await a_delivery(env)
    await jobs.delete(env, CALLER, export.job_id)

    await exports.process(env, export)

    assert sink.files == []


@pytest.fixture
def destination() -> Destination:
    return PLACE


def test_a_destination_does_not_show_its_secrets_in_logs(destination: Destination) -> None:
    assert repr(destination) == "Destination(***)"
