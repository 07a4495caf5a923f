"""Cancellation at every step: wherever it occurs, all children end in order and clean up."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import trio
from trio.testing import MockClock

from actors.runtime import (
    Child,
    DynamicSupervisor,
    Inbox,
    Intensity,
    Mailbox,
    Strategy,
    Supervisor,
    bounded_cleanup,
    nest,
)
from tests.actors.runtime.toys import Boom

BRISK = Intensity(restarts_max=5, within_s=600.0, backoff_s=0.5)
STOP_S_MAX = 0.5  # Four clean-ups of a tenth of a second run one after the other.


@dataclass
class World:
    """A small tree with each kind of child, and the invariants that hold while it runs."""

    living: list[str] = field(default_factory=list)
    uncleaned: set[str] = field(default_factory=set)
    disorders: list[str] = field(default_factory=list)
    crash_count: int = 0
    crashing: set[str] = field(default_factory=set)

    def enter(self, name: str, needs: str | None) -> None:
        if name in self.living:
            self.disorders.append(f"two of {name}")
        if needs is not None and needs not in self.living:
            self.disorders.append(f"{name} started without {needs}")
        self.living.append(name)
        self.uncleaned.add(name)

    def leave(self, name: str, dependents: tuple[str, ...]) -> None:
        for dependent in dependents:
            if dependent in self.living and name not in self.crashing:
                self.disorders.append(f"{name} stopped before {dependent}")
        self.living.remove(name)
        self.crashing.discard(name)

    async def exist(self, name: str, needs: str | None, dependents: tuple[str, ...]) -> None:
        self.enter(name, needs)
        try:
            await trio.sleep_forever()
        finally:
            with bounded_cleanup(1.0):
                await trio.sleep(0.1)
                self.uncleaned.discard(name)
            self.leave(name, dependents)

    async def base(self, *, task_status: trio.TaskStatus[None]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.exist, "base", None, ("reader", "poller", "discovery"))
            await trio.sleep(0.2)
            task_status.started()

    async def read(self, inbox: Inbox[str]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.exist, "reader", "base", ("discovery",))
            async for message in inbox:
                if message == "poison":
                    self.crashing.add("reader")  # Only a stop ends children in order.
                    self.crash_count += 1
                    raise Boom

    async def poll(self) -> None:
        await self.exist("poller", "base", ())

    async def discover(self, runs: DynamicSupervisor, mailbox: Mailbox[str]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.exist, "discovery", "reader", ())
            while True:
                await runs.start_child(Child("poller", run=self.poll, stop_grace_s=5.0))
                await mailbox.address.tell("plain")
                await trio.sleep(1.0)
                await runs.stop_child("poller")
                await mailbox.address.tell("poison")
                await trio.sleep(1.0)

    def supervisor(self) -> Supervisor:
        mailbox = Mailbox[str](capacity=1)
        runs = DynamicSupervisor("runs", stop_grace_s=5.0)

        async def discover() -> None:
            await self.discover(runs, mailbox)

        return Supervisor(
            "world",
            strategy=Strategy.REST_FOR_ONE,
            children=[
                Child("base", run=self.base, reports_ready=True, intensity=BRISK),
                nest(runs, intensity=BRISK),
                Child("reader", run=self.read, mailbox=mailbox, intensity=BRISK),
                Child("discovery", run=discover, intensity=BRISK),
            ],
        )


@dataclass(eq=False)
class CancelAtStep(trio.abc.Instrument):
    """Cancels a scope after a number of task steps, wherever its tasks are then."""

    step: int
    scope: trio.CancelScope
    step_count: int = 0

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.step_count += 1
        if self.step_count == self.step:
            self.scope.cancel()


async def live(world: World, scope: trio.CancelScope, *, for_s: float) -> float:
    """Returns how long the stop took, or nothing if the scope was cancelled earlier."""
    scope.deadline = trio.current_time() + for_s
    with scope:
        await world.supervisor().run()
    return trio.current_time() - scope.deadline


def check(world: World, when: str) -> None:
    assert world.living == [], when
    assert world.uncleaned == set(), when
    assert world.disorders == [], when


def cancel_at_step(step: int) -> tuple[World, int]:
    """Returns a world that was cancelled at this step, and how many steps it took in all."""
    world, scope = World(), trio.CancelScope()
    instrument = CancelAtStep(step, scope)

    async def main() -> None:
        await live(world, scope, for_s=12.0)

    trio.run(main, clock=MockClock(autojump_threshold=0.0), instruments=[instrument])
    return world, instrument.step_count


@pytest.mark.slow
def test_cancellation_at_any_step_ends_everything_in_order() -> None:
    whole, step_count = cancel_at_step(0)
    assert whole.crash_count > 2
    assert step_count > 100

    for step in range(1, step_count + 1):
        world, _ = cancel_at_step(step)

        check(world, f"cancelled at step {step}")


def cancel_after(for_s: float) -> tuple[World, float]:
    """Returns a world that was cancelled at this time, and how long its stop took."""
    world = World()

    async def main() -> float:
        return await live(world, trio.CancelScope(), for_s=for_s)

    return world, trio.run(main, clock=MockClock(autojump_threshold=0.0))


@pytest.mark.slow
def test_cancellation_at_any_instant_ends_everything_in_order_and_soon() -> None:
    for tenths in range(80):
        world, stop_s = cancel_after(tenths / 10)

        check(world, f"cancelled at {tenths / 10} s")
        assert stop_s <= STOP_S_MAX
