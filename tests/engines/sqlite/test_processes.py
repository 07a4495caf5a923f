"""Several processes with one data directory: an owner, and others that join it."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest
import trio

from conveyor.engines.sqlite import join_engine, open_engine
from conveyor.ports.queue import Depth
from tests.builders import RUN, ManualClock, a_ref, a_stats, a_task, keep, key_of

TASKS = 40

# Receives tasks until there are none, and counts each one once.
WORKER = """
import sys, trio
from pathlib import Path
from random import Random
from conveyor.domain.changes import Applied
from conveyor.engines.sqlite import join_engine
from tests.builders import RUN, ManualClock, a_change, a_stats, add

async def main():
    async with join_engine(Path(sys.argv[1]), clock=ManualClock(), random=Random()) as engine:
        async def work():
            while messages := await engine.queue.receive(RUN, count_max=1, visibility_s=60):
                (verdict,) = await engine.store.commit([a_change(add(a_stats(), done=1))])
                assert isinstance(verdict, Applied), verdict
                await engine.queue.ack(messages)
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(work)

trio.run(main)
"""


async def test_a_joined_engine_and_the_owner_see_each_others_writes(
    data_dir: Path, clock: ManualClock
) -> None:
    async with (
        open_engine(data_dir, clock=clock, random=Random(1), owner="dev") as owner,
        join_engine(data_dir, clock=clock, random=Random(2)) as joined,
    ):
        await keep(owner.store, a_task(1))
        await keep(joined.store, a_task(2))

        assert await joined.store.read(key_of(a_task(1))) == a_task(1)
        assert await owner.store.read(key_of(a_task(2))) == a_task(2)


@pytest.mark.slow
async def test_processes_that_share_a_queue_neither_lose_nor_repeat_a_task(
    data_dir: Path, clock: ManualClock
) -> None:
    async with open_engine(data_dir, clock=clock, random=Random(1), owner="dev") as owner:
        await keep(owner.store, a_stats())
        await owner.queue.open_run(RUN)
        await owner.queue.send([a_ref(index) for index in range(TASKS)])

        async with trio.open_nursery() as nursery:
            for _ in range(2):
                command = [sys.executable, "-c", WORKER, str(data_dir)]
                nursery.start_soon(trio.run_process, command)

        stats = await owner.store.read(key_of(a_stats()))
        assert stats is not None
        assert stats.done == TASKS
        assert await owner.queue.depth(RUN) == Depth(visible=0, hidden=0)
