"""Queue: one queue of task refs per run, at least once (SPEC.md 4.4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from conveyor.domain.ids import RunId
from conveyor.domain.model import TaskRef


class Message(msgspec.Struct, frozen=True):
    """A ref in hand. `receipt` speaks for this delivery only; `receives` counts deliveries."""

    receipt: str
    ref: TaskRef
    receives: int


class Depth(msgspec.Struct, frozen=True):
    """Messages that can be received now, and those that are in hand or wait for their time."""

    visible: int
    hidden: int


class Queue(Protocol):
    """Laws:

    - At least once: a message that is neither acked nor in hand can be received.
    - An acked message never returns.
    - A received message stays hidden for `visibility_s`, then returns by itself.
    - Only the latest receipt of a message speaks for it: acking, bouncing or extending with an
      older one changes nothing. When its own time is over it can still ack; whether it can extend
      is for the engine to say.
    - Queues of different runs share nothing.
    - Any method may raise Unavailable.
    """

    async def open_run(self, run_id: RunId) -> None:
        """Makes the run's queue; making it again is fine.

        One that was removed can be made again after a minute; until then it may be Unavailable.
        """

    async def close_run(self, run_id: RunId) -> None:
        """Removes the queue and whatever is on it; removing it again is fine."""

    async def send(self, refs: Sequence[TaskRef]) -> None:
        """Puts refs on their runs' queues; returns when every one is there. QueueGone if none."""

    async def receive(self, run_id: RunId, *, count_max: int, visibility_s: float) -> list[Message]:
        """Takes up to `count_max` visible messages, oldest first as far as the queue keeps order;
        never waits; may be empty, also when there are some.

        QueueGone when the run has no queue.
        """

    async def extend(self, messages: Sequence[Message], *, visibility_s: float) -> frozenset[str]:
        """Keeps messages hidden for longer; answers the receipts that no longer speak."""

    async def ack(self, messages: Sequence[Message]) -> None:
        """Removes messages for good; a message that is gone already is fine."""

    async def bounce(self, messages: Sequence[Message], *, delay_s: float) -> None:
        """Makes messages visible again after `delay_s`; the same messages, not new ones."""

    async def depth(self, run_id: RunId) -> Depth:
        """How many messages the queue holds; zero for a queue that is gone."""
