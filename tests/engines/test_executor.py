"""ThreadExecutor: what comes out of a thread, and what it leaves behind."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress

import pytest

from conveyor.engines.executor import ThreadExecutor


class Body(bytearray):
    """Bytes that a weak reference may name."""


async def test_a_failure_in_a_thread_does_not_keep_what_its_callers_hold() -> None:
    """Without the collector of cycles, which runs rarely: a large body would stay for minutes."""

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


async def test_the_traceback_of_a_failure_names_the_work() -> None:
    def fail() -> None:
        raise ValueError("a bad encoding")

    with pytest.raises(ValueError, match="a bad encoding") as caught:
        await ThreadExecutor().run(fail)

    assert caught.traceback[-1].name == "fail"
