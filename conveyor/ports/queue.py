"""Queue: one queue of task references per run, with delivery at least once (SPEC.md 4.4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from conveyor.domain.ids import RunId
from conveyor.domain.model import TaskRef
from conveyor.ports.errors import QueueGone, Unavailable


class Message(msgspec.Struct, frozen=True):
    """A received reference. `receipt` is valid for this delivery only; `receives` counts
    deliveries."""

    receipt: str
    ref: TaskRef
    # Includes this delivery, so it is at least 1.
    receives: int


class Depth(msgspec.Struct, frozen=True):
    """The number of messages that can be received now, and of those that are received or
    delayed."""

    visible: int
    hidden: int


class Queue(Protocol):
    """Laws:

    - At least once: a message that is neither acked nor hidden can be received.
    - An acked message never returns.
    - A received message stays hidden for `visibility_s`, then returns by itself.
    - Only the latest receipt of a message is valid: an ack, bounce or extension with an older one
      changes nothing. After its visibility has ended, the latest receipt can still ack; whether it
      can extend depends on the engine.
    - Queues of different runs share nothing.
    - Any method may raise Unavailable.
    """

    async def open_run(self, run_id: RunId) -> None:
        """Creates the run's queue; creating it again changes nothing.

        A removed queue can be created again after a minute; until then the call may raise
        Unavailable.
        """

    async def close_run(self, run_id: RunId) -> None:
        """Removes the queue and all its messages; removing it again changes nothing."""

    async def send(self, refs: Sequence[TaskRef]) -> None:
        """Sends references to the queues of their runs; returns when all are stored. Raises
        QueueGone if a queue does not exist."""

    async def receive(self, run_id: RunId, *, count_max: int, visibility_s: float) -> list[Message]:
        """Takes up to `count_max` visible messages, oldest first as far as the queue keeps order.
        Never waits. May return none although there are some.

        Raises QueueGone if the run has no queue.
        """

    async def extend(self, messages: Sequence[Message], *, visibility_s: float) -> frozenset[str]:
        """Keeps messages hidden for longer. Returns the receipts that are no longer valid."""

    async def ack(self, messages: Sequence[Message]) -> None:
        """Removes messages permanently; a message that is already removed is ignored."""

    async def bounce(self, messages: Sequence[Message], *, delay_s: float) -> None:
        """Makes messages visible again after `delay_s`: the same messages, not new ones."""

    async def depth(self, run_id: RunId) -> Depth:
        """Counts the messages of the queue; zero if the queue does not exist."""


async def send_opening(queue: Queue, refs: Sequence[TaskRef]) -> None:
    """Sends references. A queue is created together with its run; if it was lost since, or the
    process that created the run stopped in between, it is created here.

    Raises Unavailable if the queue is removed again meanwhile, because its run ended.
    """
    try:
        await queue.send(refs)
    except QueueGone:
        for run_id in sorted({ref.run_id for ref in refs}):
            await queue.open_run(run_id)
        try:
            await queue.send(refs)
        except QueueGone as error:
            raise Unavailable("the queue of a run was removed meanwhile") from error
