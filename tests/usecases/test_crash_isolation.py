"""Crash isolation: a crash ends one item only, and an outage is not treated as a crash."""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable

import pytest
import trio

from conveyor.ports.errors import QueueGone, Unavailable
from conveyor.usecases.crash_isolation import Crash, is_outage, isolate

OUTAGES = [Unavailable("away"), QueueGone("gone"), ExceptionGroup("", [Unavailable("away")])]


def handler_that_raises(error: Exception) -> Callable[[], Awaitable[str]]:
    async def handle() -> str:
        raise error

    return handle


async def test_the_result_of_a_handler_is_returned() -> None:
    async def handle() -> str:
        return "handled"

    assert await isolate(handle, "the task") == "handled"


async def test_a_crash_is_returned_and_logged_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = ValueError("a bug")

    assert await isolate(handler_that_raises(error), "the task", extra={"task_id": "t-1"}) == Crash(
        error
    )

    (line,) = caplog.records
    assert (line.levelno, line.getMessage()) == (logging.ERROR, "the task crashed its handler")
    assert line.exc_info is not None
    assert line.exc_info[1] is error
    assert line.__dict__["task_id"] == "t-1"


@pytest.mark.parametrize("error", OUTAGES, ids=repr)
async def test_an_outage_is_raised_and_not_logged(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(type(error)):
        await isolate(handler_that_raises(error), "the task")

    assert caplog.records == []


def test_an_exception_group_with_one_crash_is_not_an_outage() -> None:
    assert is_outage(ExceptionGroup("", OUTAGES))
    assert not is_outage(ExceptionGroup("", [*OUTAGES, ValueError("a bug")]))


async def test_an_expected_error_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError):
        await isolate(handler_that_raises(KeyError("known")), "the task", expects=(KeyError,))

    assert caplog.records == []


async def test_a_crash_that_was_already_logged_is_not_logged_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = KeyError("known")

    assert await isolate(handler_that_raises(error), "the task", logged=(KeyError,)) == Crash(error)
    assert caplog.records == []


async def test_a_shortage_of_descriptors_is_logged_as_a_warning_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = OSError(errno.EMFILE, "too many open files")

    assert await isolate(handler_that_raises(error), "the task") == Crash(error)

    (line,) = caplog.records
    assert (line.levelno, line.exc_info) == (logging.WARNING, None)


async def test_a_cancellation_is_not_caught() -> None:
    ends: list[object] = []

    async def handle() -> None:
        await trio.sleep_forever()

    with trio.CancelScope() as scope:
        scope.cancel()
        ends.append(await isolate(handle, "the task"))

    assert scope.cancelled_caught
    assert ends == []
