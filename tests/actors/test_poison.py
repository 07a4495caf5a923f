"""An item that crashes its handler ends after a few crashes, and its neighbours never notice."""

from __future__ import annotations

import copy
import errno
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from conveyor.domain.changes import Change, TaskKey, Update, Verdict
from conveyor.domain.model import TaskStatus
from conveyor.domain.run.wait_reason import WaitReason
from conveyor.ports.gateway import Outcome, ScrapeRequest
from conveyor.ports.secret_box import CannotUnseal
from conveyor.ports.store import Store
from conveyor.usecases.lookup import totals_of
from conveyor.usecases.run import run_progress
from tests.actors.world import a_page, make_world, urls

POISON = urls(1)[0]


def crashes(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(
        record.levelno >= logging.ERROR and text in record.getMessage() for record in caplog.records
    )


@pytest.mark.parametrize(
    "error",
    [
        ValueError("Exceeds the limit (4300 digits) for integer string conversion"),
        CannotUnseal(),
        AssertionError(),
        ExceptionGroup("", [KeyError("a")]),
        RecursionError(),
    ],
    ids=repr,
)
async def test_a_task_that_crashes_its_worker_uses_up_its_own_attempts_only(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def script(request: ScrapeRequest, attempt: int) -> Outcome:
        if request.url == POISON:
            raise copy.copy(error)  # One that is raised twice collects both tracebacks.
        return a_page()

    world = make_world(script=script)

    async with world.working():
        accepted = await world.submit(urls(300), max_attempts=3)
        _, totals = await world.ended(accepted)

    assert (totals.successful, totals.failed) == (299, 1)
    assert world.gateway.calls.total() == 299 + 3
    (poisoned,) = [row for row in await world.tasks(accepted) if row.status is TaskStatus.FAILED]
    assert poisoned.problem is not None
    assert poisoned.problem.code == "worker_crashed"
    assert [entry.number for entry in poisoned.history] == [1, 2, 3]
    assert crashes(caplog, "a task crashed its handler") == 3
    assert crashes(caplog, "child") == 0


@dataclass(slots=True)
class Allergic:
    """A store that crashes over every settle of some task."""

    inner: Store
    is_bad: Any

    async def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        if any(map(self.is_bad, changes)):
            raise ValueError("this cannot be written")
        return await self.inner.commit(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


async def test_a_settle_that_crashes_the_writer_is_taken_out_of_its_group(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world()

    def is_bad(change: Change) -> bool:
        write = change.writes[0]
        is_task = isinstance(write, Update) and isinstance(write.key, TaskKey)
        values = write.values if is_task and isinstance(write, Update) else {}
        result = values.get("result")
        return result is not None and result.size_bytes == 1

    def script(request: ScrapeRequest, attempt: int) -> Outcome:
        return a_page(b"x" if request.url == POISON else b"some page")

    world = replace(
        world, env=replace(world.env, store=cast("Any", Allergic(world.env.store, is_bad)))
    )
    world.gateway.script = script

    async with world.working():
        accepted = await world.submit(urls(80), max_attempts=2)
        _, totals = await world.ended(accepted)

    assert (totals.successful, totals.failed) == (79, 1)
    assert world.gateway.calls.total() == 79 + 2
    assert crashes(caplog, "a settle crashed its handler")
    assert crashes(caplog, "a task crashed its handler") == 0, "logged where it happened"
    assert crashes(caplog, "child") == 0


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EMFILE, ""), MemoryError(), RuntimeError("can't start new thread")],
    ids=repr,
)
async def test_a_worker_out_of_resources_puts_its_tasks_off_and_says_so(
    autojump_clock: MockClock, error: Exception
) -> None:
    ends_at = trio.current_time() + 60

    def script(request: ScrapeRequest, attempt: int) -> Outcome:
        if trio.current_time() < ends_at:
            raise copy.copy(error)  # One that is raised twice collects both tracebacks.
        return a_page()

    world = make_world(script=script)

    async with world.working():
        accepted = await world.submit(urls(100), max_attempts=1)
        await trio.sleep(30)
        run = await world.run_of(accepted)
        seen = await run_progress.load_progress(world.env, run, await totals_of(world.env, run))
        calls = world.gateway.calls.total()
        _, totals = await world.ended(accepted)

    assert (totals.successful, totals.failed) == (100, 0)
    assert seen.waiting_on is not None
    assert seen.waiting_on.reason is WaitReason.RESOURCES
    assert calls < 1000
