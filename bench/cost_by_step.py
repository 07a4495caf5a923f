"""Wraps ports so that the meter counts each of their calls for a step of a task."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from conveyor.domain.changes import (
    BatchKey,
    Change,
    RunKey,
    SettleChange,
    StatsKey,
    TaskKey,
    Update,
)
from conveyor.domain.queries import BatchesOf, StatsOf
from conveyor.engines.aws.client.usage import STEP
from conveyor.usecases.context import Context

T = TypeVar("T")

STORE_BODY, BACKGROUND, BENCH = "store body", "watch", "bench"
STEPS = (
    "submit",
    "ingest",
    "receive",
    "lease",
    "claim",
    STORE_BODY,
    "settle",
    "renew",
    "ack",
    "complete",
)
"""The steps in the order in which a task reaches them. `BACKGROUND` is the periodic polling of a
worker for runs, notices and crashed work; `BENCH` are the calls of the bench itself."""

_OF_METHOD = {
    "acquire": "lease",
    "release": "lease",
    "acquire_hosts": "lease",
    "renew": "renew",
    "extend": "renew",
    "receive": "receive",
    "bounce": "receive",
    "ack": "ack",
    "close_run": "complete",
    "add": STORE_BODY,
    "put_chunk": "ingest",
}


class StepCountingPort:
    """A port whose calls count for a step, together with every call that they make."""

    def __init__(self, port: object) -> None:
        self._port = port

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._port, name)
        if name == "open":  # Streams a body, which no step of a task does.
            return method

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await for_step(_step_of(name, args), partial(method, *args, **kwargs))

        return call


async def for_step(step: str, work: Callable[[], Awaitable[T]]) -> T:
    token = STEP.set(step)
    try:
        return await work()
    finally:
        STEP.reset(token)


def _step_of(name: str, args: Sequence[Any]) -> str:
    around = STEP.get() or BACKGROUND
    if around in {"submit", BENCH}:
        return around
    match name:
        case "commit":
            return _step_of_changes(args[0]) or around
        case "read" | "find":
            return _step_of_read(args[0]) or around
        case _:
            return _OF_METHOD.get(name, around)


def _step_of_read(argument: object) -> str | None:
    if isinstance(argument, BatchKey | BatchesOf):
        return "ingest"
    return "complete" if isinstance(argument, StatsOf | StatsKey) else None


def _step_of_changes(changes: Sequence[Change]) -> str | None:
    first = changes[0].writes[0]
    match first.key:
        case TaskKey():
            if isinstance(changes[0], SettleChange):
                return "settle"
            return "claim" if isinstance(first, Update) and first.deltas else "renew"
        case BatchKey():
            return "ingest"
        case RunKey():
            return "complete"
        case _:
            return None


def with_steps(env: Context) -> Context:
    return replace(
        env,
        store=cast("Any", StepCountingPort(env.store)),
        queue=cast("Any", StepCountingPort(env.queue)),
        blobs=cast("Any", StepCountingPort(env.blobs)),
        coordinator=cast("Any", StepCountingPort(env.coordinator)),
    )
