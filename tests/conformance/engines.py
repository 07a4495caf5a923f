"""The engines that the laws are run against, in one table."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Protocol

from conveyor.engines.embedded import open_engine
from conveyor.engines.memory import memory_engine
from conveyor.ports.blobs import Blobs
from conveyor.ports.clock import Clock
from conveyor.ports.coordinator import Coordinator
from conveyor.ports.queue import Queue
from conveyor.ports.store import Store


class Engine(Protocol):
    @property
    def store(self) -> Store: ...
    @property
    def queue(self) -> Queue: ...
    @property
    def blobs(self) -> Blobs: ...
    @property
    def coordinator(self) -> Coordinator: ...


Opener = Callable[[Path, Clock, Random], AbstractAsyncContextManager[Engine]]


@asynccontextmanager
async def _open_memory(data_dir: Path, clock: Clock, random: Random) -> AsyncIterator[Engine]:
    yield memory_engine(clock=clock, random=random)


@asynccontextmanager
async def _open_embedded(data_dir: Path, clock: Clock, random: Random) -> AsyncIterator[Engine]:
    async with open_engine(data_dir, clock=clock, random=random, owner="conformance") as engine:
        yield engine


ENGINES: dict[str, Opener] = {"memory": _open_memory, "embedded": _open_embedded}


@asynccontextmanager
async def fresh_engine(name: str, clock: Clock, *, seed: int = 1) -> AsyncIterator[Engine]:
    """A new engine of this kind that is gone afterwards: for tests that need one per example."""
    with TemporaryDirectory() as data_dir:
        async with ENGINES[name](Path(data_dir), clock, Random(seed)) as engine:
            yield engine
