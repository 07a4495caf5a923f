"""The audit of a run, also while the run makes progress."""

from __future__ import annotations

from dataclasses import dataclass, replace

from conveyor.domain.model import Run
from conveyor.domain.queries import TaskPage, TasksOf
from conveyor.usecases.context import Context
from conveyor.usecases.run import audit
from tests.usecases.faults import Fault, FaultyStore, When
from tests.usecases.world import a_world, add, submit, with_config, work


@dataclass(frozen=True, slots=True)
class BusyStore(FaultyStore):
    """Works on the run and adds tasks to it between any two pages of an audit."""

    env: Context
    run: Run

    async def page_tasks(self, query: TasksOf, *, read_max: int) -> TaskPage:
        page = await self.inner.page_tasks(query, read_max=read_max)
        await work(self.env, self.run, count=7)
        return page


async def test_a_run_that_makes_progress_during_its_audit_passes() -> None:
    world = a_world()
    accepted = await submit(world.env, 40, is_open=True)
    await add(world.env, accepted.job, 20)
    await work(world.env, accepted.run, count=5)
    never = Fault(at=10**9, when=When.BEFORE)
    store = BusyStore(world.env.store, never, world.env, accepted.run)
    env = replace(with_config(world.env, chunk_tasks=10), store=store)

    seen = await audit.audit(env, accepted.run)

    assert (seen.is_ok, seen.is_live) == (True, True), seen.differences
    assert 5 < seen.counts["done"] < 60


async def test_a_bounded_sample_of_bodies_is_read_from_the_whole_run() -> None:
    world = a_world()
    accepted = await submit(world.env, 60)
    await work(world.env, accepted.run)

    seen = await audit.audit(with_config(world.env, audit_bodies_max=5), accepted.run)

    assert (seen.bodies, seen.is_ok) == (5, True)
