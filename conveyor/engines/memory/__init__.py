"""The memory engine: every durable port as dicts of rows, for tests and the simulator
(docs/engines.md, Memory engine).

It is the reference that the other engines are compared with, so its code is as simple as possible.
Each method passes one checkpoint before it acts and none while it acts. So concurrent callers
interleave between calls, but no call is seen half done.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from conveyor.engines.memory.blobs import MemoryBlobs
from conveyor.engines.memory.coordinator import MemoryCoordinator
from conveyor.engines.memory.queue import MemoryQueue
from conveyor.engines.memory.store import MemoryStore
from conveyor.ports.clock import Clock

__all__ = [
    "MemoryBlobs",
    "MemoryCoordinator",
    "MemoryEngine",
    "MemoryQueue",
    "MemoryStore",
    "memory_engine",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEngine:
    """The ports of one memory engine. They must be used together."""

    store: MemoryStore
    queue: MemoryQueue
    blobs: MemoryBlobs
    coordinator: MemoryCoordinator


def memory_engine(*, clock: Clock, random: Random) -> MemoryEngine:
    """Returns an empty engine. The same clock and the same seed give the same history."""
    queue = MemoryQueue(clock, random)
    return MemoryEngine(
        store=MemoryStore(queue),
        queue=queue,
        blobs=MemoryBlobs(),
        coordinator=MemoryCoordinator(clock, random),
    )
