"""The fault injector of one run of a process: every call of the process to its engine passes it
(docs/simulator.md, How a world runs).

A dead process has no further effect: its calls neither reach the engine nor return, so the clean-up
of its actors does nothing. A paused process waits in its next call.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, TypeVar, cast

import trio

from conveyor.engines.aws.errors import AwsError, NoResponse, is_refused_for_now, is_unknown
from conveyor.ports.errors import Unavailable
from conveyor.simulation.backends.storage_outage import storage_error
from conveyor.simulation.faults.faults import Fault, Faults
from conveyor.simulation.invariant_monitor import Acked, InvariantMonitor
from conveyor.simulation.trace.format import describe
from conveyor.simulation.trace.trace import Trace

P = TypeVar("P")
T = TypeVar("T")

# A slow call takes this long; some outlast a lease.
SLOW_S = (1.0, 30.0)
# The share of calls that take no virtual time, so that many happen at the same instant.
AT_ONCE = 0.7

# Calls that happen often and change nothing important: a summary of the trace leaves them out.
_MINOR = frozenset(
    {"read", "find", "page_tasks", "receive", "count", "list_status", "depth", "put_status", "open"}
)
# The calls with which a worker keeps its claims and messages.
_BEATS = frozenset({"renew", "extend"})
# Calls that change no rows.
_HARMLESS = _MINOR | {"upload_url", "download_url"}


class Killed(BaseException):
    """The process is dead. It is a BaseException so that no handler in the program catches it."""


class InjectedCrash(Exception):
    """An error that no engine may raise: the actor that made the call crashes."""


class Poison(InjectedCrash):
    """The input crashes its handler each time that it is handled."""


@dataclass(slots=True, kw_only=True)
class ProcessFaults:
    """Injects faults into the calls of one process, from its start to its end.

    `scope` contains all tasks of the process. `refusal` makes the error of an engine that does not
    answer. `is_harsh` is False for engines whose models have call faults of their own; then only
    outages, crashes and kills are injected here.
    """

    name: str
    trace: Trace
    faults: Faults
    random: Random
    latency_s: float
    watcher: InvariantMonitor
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    is_dead: bool = False
    resumed: trio.Event | None = None
    refusal: Callable[[str], Exception] = Unavailable
    is_harsh: bool = True

    def kill(self, how: Fault) -> None:
        if not self.is_dead:
            self.is_dead = True
            self.watcher.history.kills_count += 1
            self.trace.note(self.name, "killed", how.value)
            self.scope.cancel(reason="killed")

    def pause(self) -> None:
        self.resumed = trio.Event()
        self.trace.note(self.name, "paused")

    def resume(self) -> None:
        if self.resumed is not None:
            self.resumed.set()
            self.resumed = None
            self.trace.note(self.name, "resumed")

    def through(self, port: P, name: str, *, is_harsh: bool | None = None) -> P:
        """Returns the port with faults injected into each call. `is_harsh` overrides that of the
        injector for this port."""
        enter = _through if is_harsh is None else partial(_through, is_harsh=is_harsh)
        return cast("P", _Guarded(port, name, self, enter))

    def noting(self, port: P, name: str) -> P:
        """Returns the port with each call noted in the trace. Its faults are injected below it,
        where it calls its services."""
        return cast("P", _Guarded(port, name, self, _beside))

    async def call(
        self,
        name: str,
        method: str,
        act: Callable[[], Awaitable[T]],
        *,
        is_write: bool,
        has_effect: bool = False,
        is_harsh: bool | None = None,
    ) -> T:
        """Performs one call, with the faults of this world before and after it.

        `is_write` means that the call may change rows: the monitor then checks them. `has_effect`
        means that it changes something else, so the process may be killed after it.
        """
        is_harsh = self.is_harsh if is_harsh is None else is_harsh
        await self._wait()
        self.watcher.called()
        if self.faults.strikes(Fault.KILLED_BEFORE):
            self._die(Fault.KILLED_BEFORE)
        before_s, after_s = self._latencies() if is_harsh else (0.0, 0.0)
        if before_s:
            await trio.sleep(before_s)
            self.check()
        if self.faults.is_outage or (is_harsh and self.faults.strikes(Fault.CALL_REFUSED)):
            self.failed(f"{name}.{method}", "refused by the world")
            refusal = Unavailable if is_harsh else self.refusal
            raise refusal(f"{name}.{method}: the engine did not answer")
        self._refuse_storage(name, method)
        if self.faults.strikes(Fault.ACTOR_CRASHED):
            self.failed(f"{name}.{method}", "sabotaged")
            self.watcher.history.sabotaged_at.append(trio.current_time())
            raise InjectedCrash(f"{name}.{method}")
        answer = await self._done(f"{name}.{method}", act)
        if is_write:
            self.watcher.wrote()
        if (is_write or has_effect) and self.faults.strikes(Fault.KILLED_AFTER):
            self._die(Fault.KILLED_AFTER)
        if is_harsh and self.faults.strikes(Fault.ANSWER_LOST):
            self.failed(f"{name}.{method}", "done, and the answer lost")
            raise Unavailable(f"{name}.{method}: the answer was lost")
        if after_s:
            await trio.sleep(after_s)
        self.check()
        return answer

    def failed(self, call: str, how: str) -> None:
        """Notes a call that an injected fault made fail. A summary of the trace shows only some of
        these lines."""
        self.trace.note(self.name, call, how, is_minor=True, is_fault=True)

    def _refuse_storage(self, name: str, method: str) -> None:
        fault = self.faults.storage_fault
        error = storage_error(fault, name, method)
        if fault is not None and error is not None:
            self.faults.count(fault)
            self.failed(f"{name}.{method}", fault.value)
            raise error

    def check(self) -> None:
        if self.is_dead:
            raise Killed

    async def _wait(self) -> None:
        self.check()
        while self.resumed is not None:
            await self.resumed.wait()
            self.check()

    async def _done(self, call: str, act: Callable[[], Awaitable[T]]) -> T:
        try:
            return await act()
        except Exception as error:
            if _is_the_worlds(error):
                self.failed(call, str(error))
            raise

    def _latencies(self) -> tuple[float, float]:
        """The delays before the effect of a call, and between the effect and the answer."""
        if self.faults.strikes(Fault.CALL_SLOW):
            long_s, share = self.random.uniform(*SLOW_S), self.random.random()
            return long_s * share, long_s * (1.0 - share)
        if self.random.random() < AT_ONCE:
            return 0.0, 0.0
        return self.random.uniform(0.0, self.latency_s), 0.0

    def _die(self, how: Fault) -> None:
        self.kill(how)
        raise Killed


def _is_the_worlds(error: Exception) -> bool:
    """Whether the error is a failure of the engine rather than an answer, such as a failed
    condition."""
    if isinstance(error, AwsError):
        return is_refused_for_now(error) or is_unknown(error)
    return isinstance(error, NoResponse | Unavailable | OSError)


Enter = Callable[[ProcessFaults, str, Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""How a call of a wrapped port reaches the engine."""


class _Guarded:
    def __init__(self, port: object, name: str, life: ProcessFaults, enter: Enter) -> None:
        self._port = port
        self._name = name
        self._life = life
        self._enter = enter

    def __getattr__(self, method: str) -> Any:
        target = getattr(self._port, method)
        if inspect.isasyncgenfunction(target):
            guarded = _guarded_stream(target, f"{self._name}.{method}", self._life, self._enter)
        elif inspect.iscoroutinefunction(target):
            guarded = _guarded_call(target, f"{self._name}.{method}", self._life, self._enter)
        else:
            guarded = target
        self.__dict__[method] = guarded
        return guarded


async def _through(
    life: ProcessFaults,
    call: str,
    act: Callable[[], Awaitable[T]],
    *,
    is_harsh: bool | None = None,
) -> T:
    name, _, method = call.partition(".")
    is_write = method not in _HARMLESS
    return await life.call(name, method, act, is_write=is_write, is_harsh=is_harsh)


async def _beside(life: ProcessFaults, call: str, act: Callable[[], Awaitable[T]]) -> T:
    life.check()
    return await act()


def _guarded_call(target: Callable[..., Any], call: str, life: ProcessFaults, enter: Enter) -> Any:
    method = call.partition(".")[2]

    async def guarded(*args: Any, **kwargs: Any) -> Any:
        async def act() -> Any:
            if method == "ack":
                refs = [(message.ref.run_id, message.ref.task_id) for message in args[0]]
                life.watcher.acks(Acked(life.name, refs))
            if method == "release":
                life.watcher.history.released.update(args[0])
            if method == "receive" and life.is_harsh:
                answer = await _receive(life, target, args, kwargs)
            else:
                answer = await target(*args, **kwargs)
            detail = describe(method, args, answer)
            life.trace.note(life.name, call, detail, is_minor=method in _MINOR)
            return answer

        if method in _BEATS and life.faults.strikes(Fault.BEAT_SKIPPED):
            life.trace.note(life.name, call, "skipped")
            raise Unavailable(f"{call}: skipped")
        return await enter(life, call, act)

    return guarded


async def _receive(
    life: ProcessFaults, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A queue may return nothing although it has messages, return messages too early or too late,
    and deliver a message twice."""
    if life.faults.strikes(Fault.FALSE_EMPTY):
        return []
    if life.faults.strikes(Fault.EARLY_RETURN):
        kwargs = {**kwargs, "visibility_s": kwargs["visibility_s"] * life.random.uniform(0.9, 1.1)}
    if life.faults.strikes(Fault.DUPLICATE_DELIVERY):
        kwargs = {**kwargs, "visibility_s": 0.0}
    return await target(*args, **kwargs)


def _guarded_stream(
    target: Callable[..., Any], call: str, life: ProcessFaults, enter: Enter
) -> Any:
    async def guarded(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        async with aclosing(target(*args, **kwargs)) as pieces:
            while True:
                try:
                    piece = await enter(life, call, lambda: anext(pieces))
                except StopAsyncIteration:
                    return
                life.trace.note(life.name, call, f"{len(piece)} bytes", is_minor=True)
                yield piece

    return guarded
