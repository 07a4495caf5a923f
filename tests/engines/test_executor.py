"""ThreadExecutor: results and errors of a thread, and what stays in memory."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress

import pytest

from conveyor.engines.executor import ThreadExecutor


class Body(bytearray):
    """Bytes that can have a weak reference."""


async def test_an_error_in_a_thread_does_not_keep_the_data_of_its_callers_in_memory() -> None:
    """The garbage collector is off, because it runs rarely and a large body would stay for
    minutes."""

    def fail() -> None:
        raise ValueError("a bad encoding")

    async def decode() -> weakref.ref[Body]:
        body = Body(b"page")
        held = weakref.ref(body)
        with suppress(ValueError):
            await decode_in_thread(body)
        return held

    async def decode_in_thread(body: Body) -> None:
        assert body
        await ThreadExecutor().run(fail)

    gc.disable()
    try:
        held = await decode()
        is_kept = held() is not None
    finally:
        gc.enable()

    assert not is_kept


async def test_the_traceback_of_an_error_contains_the_work() -> None:
    def fail() -> None:
        raise ValueError("a bad encoding")

    with pytest.raises(ValueError, match="a bad encoding") as caught:
        await ThreadExecutor().run(fail)

    assert caught.traceback[-1].name == "fail"
