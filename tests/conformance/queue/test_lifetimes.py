"""The laws of Queue about queues: one for each run, created and removed (docs/architecture.md,
Discovery)."""

from __future__ import annotations

import pytest

from conveyor.ports.errors import QueueGone
from conveyor.ports.queue import Depth, Queue
from tests.builders import OTHER_RUN, RUN, ManualClock, a_ref
from tests.conformance.queue.laws import EMPTY, open_and_send, receive, refs_of


async def test_queues_of_different_runs_share_nothing(queue: Queue) -> None:
    await queue.open_run(RUN)
    await queue.open_run(OTHER_RUN)
    await queue.send([a_ref(0), a_ref(1, OTHER_RUN), a_ref(2)])

    here = await receive(queue)
    await queue.close_run(RUN)

    assert refs_of(here) == [a_ref(0), a_ref(2)]
    assert await queue.depth(OTHER_RUN) == Depth(visible=1, hidden=0)
    there = await queue.receive(OTHER_RUN, count_max=10, visibility_s=60)
    assert refs_of(there) == [a_ref(1, OTHER_RUN)]


async def test_creating_a_queue_again_keeps_its_messages(queue: Queue) -> None:
    await open_and_send(queue, a_ref())

    await queue.open_run(RUN)

    assert await queue.depth(RUN) == Depth(visible=1, hidden=0)


async def test_removing_a_queue_removes_its_messages(queue: Queue, clock: ManualClock) -> None:
    await open_and_send(queue, a_ref(0), a_ref(1))
    await receive(queue, count_max=1)

    await queue.close_run(RUN)

    assert await queue.depth(RUN) == EMPTY
    clock.advance(60)
    await queue.open_run(RUN)
    assert await receive(queue) == []


async def test_removing_a_queue_again_changes_nothing(queue: Queue) -> None:
    await open_and_send(queue, a_ref())

    await queue.close_run(RUN)
    await queue.close_run(RUN)

    assert await queue.depth(RUN) == EMPTY


async def test_receipts_of_a_removed_queue_are_not_valid_for_its_successor(
    queue: Queue, clock: ManualClock
) -> None:
    await open_and_send(queue, a_ref(0))
    [old] = await receive(queue, visibility_s=1000)
    await queue.close_run(RUN)
    clock.advance(60)
    await open_and_send(queue, a_ref(1))
    await receive(queue, visibility_s=60)

    lost = await queue.extend([old], visibility_s=60)
    await queue.bounce([old], delay_s=0)
    await queue.ack([old])

    assert lost == frozenset({old.receipt})
    assert await queue.depth(RUN) == Depth(visible=0, hidden=1)


async def test_sending_to_a_removed_queue_raises_queue_gone(queue: Queue) -> None:
    with pytest.raises(QueueGone):
        await queue.send([a_ref()])

    await open_and_send(queue)
    await queue.close_run(RUN)
    with pytest.raises(QueueGone):
        await queue.send([a_ref()])
    assert await queue.depth(RUN) == EMPTY


async def test_receiving_from_a_removed_queue_raises_queue_gone(queue: Queue) -> None:
    with pytest.raises(QueueGone):
        await receive(queue)

    await open_and_send(queue)
    await queue.close_run(RUN)
    with pytest.raises(QueueGone):
        await receive(queue)


async def test_receiving_from_an_empty_queue_does_not_raise(queue: Queue) -> None:
    await open_and_send(queue)

    assert await receive(queue) == []


async def test_sending_no_references_changes_nothing(queue: Queue) -> None:
    await queue.send([])

    assert await queue.depth(RUN) == EMPTY


async def test_depth_counts_visible_and_hidden_messages_separately(
    queue: Queue, clock: ManualClock
) -> None:
    await open_and_send(queue, *(a_ref(index) for index in range(5)))
    [bounced, acked, _held] = await receive(queue, count_max=3, visibility_s=60)
    await queue.bounce([bounced], delay_s=5)
    await queue.ack([acked])

    depths = [await queue.depth(RUN)]
    for seconds in (5, 55):
        clock.advance(seconds)
        depths.append(await queue.depth(RUN))

    assert depths == [
        Depth(visible=2, hidden=2),
        Depth(visible=3, hidden=1),
        Depth(visible=4, hidden=0),
    ]


async def test_the_depth_of_a_removed_queue_is_zero(queue: Queue) -> None:
    assert await queue.depth(RUN) == EMPTY
