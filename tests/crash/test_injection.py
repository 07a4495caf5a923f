"""Tests the crash switch: it can end the process before and after every call of an engine."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
import trio

from conveyor.ports.blobs import Blobs
from conveyor.ports.coordinator import Coordinator
from conveyor.ports.queue import Queue
from conveyor.ports.store import Store
from tests.crash.injection import (
    BadCrashPoint,
    CrashingTransport,
    CrashSwitch,
    crashing,
    parse_crash_point,
)
from tests.engines.aws.scripted import ScriptedTransport

CALLS = [
    (name, method)
    for name, port in (
        ("store", Store),
        ("queue", Queue),
        ("blobs", Blobs),
        ("coordinator", Coordinator),
    )
    for method, _ in inspect.getmembers(port, inspect.isfunction)
    if not method.startswith("_")
]


class Ended(Exception):
    """Raised in place of ending the process."""


class Everything:
    """A port that answers every call and counts the calls."""

    def __init__(self) -> None:
        self.called = 0

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def call(*args: object, **kwargs: object) -> None:
            await trio.lowlevel.checkpoint()
            self.called += 1

        async def stream(*args: object, **kwargs: object) -> AsyncGenerator[bytes, None]:
            await trio.lowlevel.checkpoint()
            self.called += 1
            yield b"piece"

        return stream if method == "open" else call


def end(code: int) -> None:
    assert code == 137
    raise Ended


async def use(port: Any, method: str) -> None:
    answer = getattr(port, method)()
    if inspect.isasyncgen(answer):
        async for _ in answer:
            pass
    else:
        await answer


@pytest.mark.parametrize(("name", "method"), CALLS)
@pytest.mark.parametrize(("side", "called"), [("before", 1), ("after", 2)])
async def test_the_switch_ends_the_process_at_every_engine_call(
    name: str, method: str, side: str, called: int
) -> None:
    everything = Everything()
    port = crashing(everything, name, CrashSwitch(f"{name}.{method}", 2, side, end))

    await use(port, method)
    with pytest.raises(Ended):
        await use(port, method)

    assert everything.called == called


async def test_calls_other_than_the_crash_point_pass() -> None:
    everything = Everything()
    port = crashing(everything, "store", CrashSwitch("store.commit", 1, "before", end))

    await use(port, "read")

    assert everything.called == 1


@pytest.mark.parametrize("text", ["", "commit:1:before", "store.commit:x:before", "store.commit:1"])
def test_an_invalid_crash_point_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(BadCrashPoint, match=r"store\.commit:1:after"):
        parse_crash_point(text)


@pytest.mark.parametrize(("side", "requests_count"), [("before", 0), ("after", 1)])
async def test_the_switch_ends_the_process_before_or_after_an_aws_call(
    side: str, requests_count: int
) -> None:
    transport = ScriptedTransport({})
    crashing_transport = CrashingTransport(
        transport, CrashSwitch("dynamodb.PutItem", 1, side, end=end)
    )

    with pytest.raises(Ended):
        await crashing_transport.call("dynamodb", "PutItem", {}, deadline_s=1.0)

    assert len(transport.asked) == requests_count
