"""Packs of bodies: when a pack is sent, by which caller, and what happens if a caller or S3
fails."""

from __future__ import annotations

from collections import Counter
from contextlib import aclosing
from dataclasses import replace
from random import Random

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from conveyor.engines.aws import packs as module
from conveyor.engines.aws.client.usage import Meter
from conveyor.engines.aws.packs import Packing, Packs
from conveyor.engines.aws.s3 import S3Blobs
from conveyor.engines.packed_key import part_of
from conveyor.ports.blobs import Stored
from conveyor.ports.errors import BlobMissing, StorageDamaged, Unavailable
from tests.builders import ManualClock
from tests.simulation.models.worlds import NAMES, World

RUN = "jobs/j/runs/r"
PUT_S = 0.1


class Objects:
    """A store for packs that takes some time and can refuse."""

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}
        self.started: list[str] = []
        self.sending_bytes_most = 0
        self.refusals_left = 0
        self._sending_bytes = 0

    async def put(self, key: str, body: bytes) -> None:
        self.started.append(key)
        self._sending_bytes += len(body)
        self.sending_bytes_most = max(self.sending_bytes_most, self._sending_bytes)
        try:
            await trio.sleep(PUT_S)
        finally:
            self._sending_bytes -= len(body)
        if self.refusals_left:
            self.refusals_left -= 1
            raise Unavailable("not now")
        self.stored[key] = body

    def packs(self, wait_s: float = 1.0, waiting_max: int = 1_000) -> Packs:
        return Packs(self.put, Random(1), Packing(wait_s, waiting_max))

    def body(self, stored: Stored) -> bytes:
        part = part_of(stored.key)
        assert part is not None
        return self.stored[part.pack_key][part.offset : part.offset + part.size_bytes]


async def add_all(
    packs: Packs, count: int, *, prefixes: int = 1, size_bytes: int = 10
) -> dict[int, Stored]:
    stored: dict[int, Stored] = {}

    async def add(number: int) -> None:
        body = b"%10d" % number + bytes(size_bytes - 10)
        stored[number] = await packs.add(f"{RUN}{number % prefixes}", body)

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(add, number)
    return stored


async def test_bodies_that_are_added_at_the_same_time_share_an_object(
    autojump_clock: MockClock,
) -> None:
    objects = Objects()

    stored = await add_all(objects.packs(), 30)

    assert len(objects.stored) == 1
    assert trio.current_time() == pytest.approx(module.QUIET_SHARE * 1.0 + PUT_S)
    assert all(objects.body(stored[number]) == b"%10d" % number for number in stored)


async def test_a_pack_that_gets_more_bodies_waits_for_its_whole_time(
    autojump_clock: MockClock,
) -> None:
    objects = Objects()
    packs = objects.packs(wait_s=2.0)

    async with trio.open_nursery() as nursery:
        for _ in range(30):
            nursery.start_soon(packs.add, RUN, b"body")
            await trio.sleep(0.1)

    # The first pack was closed after 2 s, and the second half a second after its last body.
    assert [len(body) for body in objects.stored.values()] == [20 * 4, 10 * 4]
    assert trio.current_time() == pytest.approx(2.9 + 0.5 + PUT_S)


async def test_a_pack_has_bodies_of_one_prefix_only(autojump_clock: MockClock) -> None:
    objects = Objects()

    stored = await add_all(objects.packs(), 30, prefixes=3)

    assert {key.rpartition("/")[0] for key in objects.stored} == {f"{RUN}{n}" for n in range(3)}
    assert all(objects.body(stored[number]) == b"%10d" % number for number in stored)


async def test_a_full_pack_is_sent_at_once(autojump_clock: MockClock) -> None:
    objects = Objects()

    await add_all(objects.packs(), 2 * module.BODIES_MAX)

    assert len(objects.stored) == 2
    assert trio.current_time() == pytest.approx(PUT_S)


async def test_a_pack_that_has_reached_its_maximum_bytes_is_full(autojump_clock: MockClock) -> None:
    objects = Objects()
    size_bytes = module.PACK_BYTES_MAX // 4

    await add_all(objects.packs(), 9, size_bytes=size_bytes)

    assert sorted(map(len, objects.stored.values())) == [size_bytes, *[4 * size_bytes] * 2]


async def test_the_oldest_pack_is_sent_when_too_many_bodies_wait(autojump_clock: MockClock) -> None:
    objects = Objects()
    packs = objects.packs(waiting_max=3)

    async with trio.open_nursery() as nursery:
        for prefix in ("a", "b", "b"):
            nursery.start_soon(packs.add, prefix, b"body")
            await wait_all_tasks_blocked(0.01)
        await trio.sleep(2 * PUT_S)
        sent_early = {key.partition("/")[0] for key in objects.stored}

    assert sent_early == {"a"}
    assert {key.partition("/")[0] for key in objects.stored} == {"a", "b"}


@pytest.mark.parametrize("cancelled_after_s", [0.5, 1.0 + PUT_S / 2])
async def test_a_pack_is_sent_although_the_sending_caller_is_cancelled(
    autojump_clock: MockClock, cancelled_after_s: float
) -> None:
    objects = Objects()
    packs = objects.packs()
    stored: list[Stored] = []

    async def add() -> None:
        stored.append(await packs.add(RUN, b"kept"))

    async with trio.open_nursery() as nursery:
        with trio.move_on_after(cancelled_after_s):
            async with trio.open_nursery() as sender:
                sender.start_soon(packs.add, RUN, b"lost")
                await wait_all_tasks_blocked()
                for _ in range(3):
                    nursery.start_soon(add)

    assert [objects.body(each) for each in stored] == [b"kept"] * 3
    assert set(Counter(objects.started)) == set(objects.stored)


async def test_a_pack_whose_callers_were_all_cancelled_is_not_sent(
    autojump_clock: MockClock,
) -> None:
    objects = Objects()
    packs = objects.packs()

    with trio.move_on_after(0.1):
        await packs.add(RUN, b"lost")
    await trio.sleep(2.0)
    stored = await packs.add(RUN, b"kept")

    assert list(objects.stored.values()) == [b"kept"]
    assert objects.body(stored) == b"kept"


async def test_every_body_of_a_refused_pack_can_be_added_again(
    autojump_clock: MockClock,
) -> None:
    objects = Objects()
    objects.refusals_left = 1
    packs = objects.packs()
    refused = 0
    stored: list[Stored] = []

    async def add() -> None:
        nonlocal refused
        try:
            stored.append(await packs.add(RUN, b"body"))
        except Unavailable:
            refused += 1
            stored.append(await packs.add(RUN, b"body"))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(add)

    assert refused == 5
    assert [objects.body(each) for each in stored] == [b"body"] * 5
    assert len(objects.stored) == 1


async def test_the_memory_of_packs_being_sent_is_bounded(autojump_clock: MockClock) -> None:
    objects = Objects()

    await add_all(objects.packs(), 48, prefixes=6, size_bytes=module.PACKED_BYTES_MAX)

    assert len(objects.stored) == 6
    assert objects.sending_bytes_most == module.SENDING_BYTES_MAX


async def some_blobs() -> tuple[S3Blobs, World]:
    world = World(seed=1)
    await world.set_up()
    blobs = S3Blobs(
        client=replace(world.client(), meter=Meter()),
        presigner=world.aws,
        clock=ManualClock(),
        random=Random(1),
        bucket=NAMES.bucket,
    )
    return blobs, world


async def test_a_body_in_a_pack_is_streamed_and_a_single_body_has_a_url(
    autojump_clock: MockClock,
) -> None:
    blobs, _ = await some_blobs()
    part = await blobs.add(RUN, "small", [b"small"])
    alone = await blobs.add(RUN, "large", [bytes(module.PACKED_BYTES_MAX + 1)])

    async def url_of(stored: Stored) -> str | None:
        return await blobs.download_url(
            stored.key, content_type="text/html", filename="page", expires_at=T_END
        )

    assert await url_of(part) is None
    assert await url_of(alone) is not None


T_END = 4e9


async def test_a_body_in_a_truncated_pack_is_damaged(autojump_clock: MockClock) -> None:
    blobs, world = await some_blobs()
    stored = await blobs.add(RUN, "name", [b"a whole body"])
    (key,) = world.aws.s3.buckets[NAMES.bucket].objects
    await world.s3("PutObject", Key=key, Body=b"a whole")

    with pytest.raises(StorageDamaged):
        async with aclosing(blobs.open(stored.key)) as pieces:
            assert [piece async for piece in pieces]


async def test_bodies_of_a_deleted_run_are_missing(autojump_clock: MockClock) -> None:
    blobs, world = await some_blobs()
    stored = [await blobs.add(RUN, "name", [b"body"]) for _ in range(2)]

    assert await blobs.delete_prefix(RUN) == 2

    assert not world.aws.s3.buckets[NAMES.bucket].objects
    for each in stored:
        with pytest.raises(BlobMissing):
            async with aclosing(blobs.open(each.key)) as pieces:
                assert [piece async for piece in pieces]


async def test_without_a_wait_each_body_is_an_object(autojump_clock: MockClock) -> None:
    blobs, _ = await some_blobs()

    stored = await replace(blobs, packing=Packing(wait_s=0.0)).add(RUN, "name", [b"body"])

    assert stored.key == f"{RUN}/name"
