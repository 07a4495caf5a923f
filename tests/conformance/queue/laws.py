"""Helpers of the tests of the Queue laws."""

from __future__ import annotations

from conveyor.domain.model import TaskRef
from conveyor.ports.queue import Depth, Message, Queue
from tests.builders import RUN

EMPTY = Depth(visible=0, hidden=0)


async def open_and_send(queue: Queue, *refs: TaskRef) -> None:
    await queue.open_run(RUN)
    await queue.send(refs)


async def receive(queue: Queue, count_max: int = 10, visibility_s: float = 60) -> list[Message]:
    return await queue.receive(RUN, count_max=count_max, visibility_s=visibility_s)


def refs_of(messages: list[Message]) -> list[TaskRef]:
    return [message.ref for message in messages]
