"""Ends a process of a test at the n-th call of a named port method.

`TEST_CRASH_AT=store.commit:3:after` ends the process after the third commit took effect and before
its caller gets the answer. Calls to AWS are named by service and operation, as in
`dynamodb.PutItem:1:before`. The process does not clean up, so it ends as if it were killed.
`tests/crash/program.py` runs the product with its ports wrapped.
"""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

from conveyor.engines.aws.client.client import Answer, AwsTransport, Params

P = TypeVar("P")

VARIABLE = "TEST_CRASH_AT"
PROGRAM = "tests.crash.program"

EXIT_CODE = 137  # As after SIGKILL (128 + 9).


class BadCrashPoint(ValueError):
    """The text is not `<call>:<n>:<before|after>`."""


class Switch(Protocol):
    def passes(self, call: str, side: str) -> None:
        """Ends the process if this call, before or after its effect, is the crash point."""


@dataclass(frozen=True, slots=True)
class CrashSwitch:
    """A crash point: the name of a call, its number, and whether before or after its effect."""

    call: str
    count: int
    side: str
    # `os._exit` and not `sys.exit`: no `finally` block and no exit handler may run.
    end: Callable[[int], Any] = os._exit
    seen: Counter[str] = field(default_factory=Counter)

    def passes(self, call: str, side: str) -> None:
        if call != self.call or side != self.side:
            return
        self.seen[call] += 1
        if self.seen[call] == self.count:
            self.end(EXIT_CODE)


def parse_crash_point(text: str) -> CrashSwitch:
    call, _, rest = text.partition(":")
    count, _, side = rest.partition(":")
    if "." not in call or not count.isdigit() or side not in {"before", "after"}:
        raise BadCrashPoint(f"{text!r} is not <call>:<n>:<before|after>: store.commit:1:after")
    return CrashSwitch(call, int(count), side)


def crashing(port: P, name: str, switch: Switch) -> P:
    """Wraps a port so that the switch is called before and after each of its calls."""
    return cast("P", _Crashing(port, name, switch))


class _Crashing:
    def __init__(self, port: object, name: str, switch: Switch) -> None:
        self._port = port
        self._name = name
        self._switch = switch

    def __getattr__(self, method: str) -> Any:
        target = getattr(self._port, method)
        call = f"{self._name}.{method}"
        if inspect.isasyncgenfunction(target):
            return _crashing_stream(target, call, self._switch)
        if inspect.iscoroutinefunction(target):
            return _crashing_call(target, call, self._switch)
        return target


def _crashing_call(target: Callable[..., Any], call: str, switch: Switch) -> Any:
    async def guarded(*args: Any, **kwargs: Any) -> Any:
        switch.passes(call, "before")
        answer = await target(*args, **kwargs)
        switch.passes(call, "after")
        return answer

    return guarded


def _crashing_stream(target: Callable[..., Any], call: str, switch: Switch) -> Any:
    async def guarded(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        switch.passes(call, "before")
        stream = target(*args, **kwargs)
        try:
            async for piece in stream:
                yield piece
        finally:
            await stream.aclose()
        switch.passes(call, "after")

    return guarded


@dataclass(frozen=True, slots=True)
class CrashingTransport:
    """An AWS transport that calls the switch before and after each AWS call."""

    transport: AwsTransport
    switch: Switch

    async def call(
        self, service: str, operation: str, params: Params, *, deadline_s: float
    ) -> Answer:
        self.switch.passes(f"{service}.{operation}", "before")
        answer = await self.transport.call(service, operation, params, deadline_s=deadline_s)
        self.switch.passes(f"{service}.{operation}", "after")
        return answer

    @asynccontextmanager
    async def open(
        self, service: str, operation: str, params: Params, *, deadline_s: float
    ) -> AsyncGenerator[Answer, None]:
        self.switch.passes(f"{service}.{operation}", "before")
        async with self.transport.open(service, operation, params, deadline_s=deadline_s) as answer:
            self.switch.passes(f"{service}.{operation}", "after")
            yield answer
