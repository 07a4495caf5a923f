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
NO_DELAY_SHARE = 0.7

# Calls that happen often and change nothing important: a summary of the trace leaves them out.
_MINOR = frozenset(
    {"read", "find", "page_tasks", "receive", "count", "list_status", "depth", "put_status", "open"}
)
# The calls with which a worker keeps its claims and messages.
_HEARTBEATS = frozenset({"renew", "extend"})
# Calls that change no rows.
_WITHOUT_WRITES = _MINOR | {"upload_url", "download_url"}


class Killed(BaseException):
    """The process is dead. It is a BaseException so that no handler in the program catches it."""


class InjectedCrash(Exception):
    """An error that no engine may raise: the actor that made the call crashes."""


class PoisonedInput(InjectedCrash):
    """The input crashes its handler each time that it is handled."""


@dataclass(slots=True, kw_only=True)
class FaultInjector:
    """Injects faults into the calls of one process, from its start to its end.

    `scope` contains all tasks of the process. `refusal` makes the error of an engine that does not
    answer. `has_call_faults` is False for engines whose models have call faults of their own; then
    only outages, crashes and kills are injected here.
    """

    name: str
    trace: Trace
    faults: Faults
    random: Random
    latency_s: float
    monitor: InvariantMonitor
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    is_dead: bool = False
    resumed: trio.Event | None = None
    refusal: Callable[[str], Exception] = Unavailable
    has_call_faults: bool = True

    def kill(self, how: Fault) -> None:
        if not self.is_dead:
            self.is_dead = True
            self.monitor.history.kills_count += 1
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

    def with_faults(self, port: P, name: str, *, has_call_faults: bool | None = None) -> P:
        """Returns the port with faults injected into each call. `has_call_faults` overrides that of
        the injector for this port."""
        invoke = (
            _call_with_faults
            if has_call_faults is None
            else partial(_call_with_faults, has_call_faults=has_call_faults)
        )
        return cast("P", _WrappedPort(port, name, self, invoke))

    def with_trace(self, port: P, name: str) -> P:
        """Returns the port with each call noted in the trace. Its faults are injected below it,
        where it calls its services."""
        return cast("P", _WrappedPort(port, name, self, _call_without_faults))

    async def call(
        self,
        name: str,
        method: str,
        act: Callable[[], Awaitable[T]],
        *,
        is_write: bool,
        has_effect: bool = False,
        has_call_faults: bool | None = None,
    ) -> T:
        """Performs one call, with the faults of this world before and after it.

        `is_write` means that the call may change rows: the monitor then checks them. `has_effect`
        means that it changes something else, so the process may be killed after it.
        """
        has_call_faults = self.has_call_faults if has_call_faults is None else has_call_faults
        await self._wait()
        self.monitor.on_call()
        if self.faults.occurs(Fault.KILLED_BEFORE):
            self._die(Fault.KILLED_BEFORE)
        before_s, after_s = self._latencies() if has_call_faults else (0.0, 0.0)
        if before_s:
            await trio.sleep(before_s)
            self.check()
        if self.faults.is_outage or (has_call_faults and self.faults.occurs(Fault.CALL_REFUSED)):
            self.failed(f"{name}.{method}", "refused by the world")
            refusal = Unavailable if has_call_faults else self.refusal
            raise refusal(f"{name}.{method}: the engine did not answer")
        self._refuse_storage(name, method)
        if self.faults.occurs(Fault.ACTOR_CRASHED):
            self.failed(f"{name}.{method}", "sabotaged")
            self.monitor.history.crash_injected_at.append(trio.current_time())
            raise InjectedCrash(f"{name}.{method}")
        answer = await self._perform(f"{name}.{method}", act)
        if is_write:
            self.monitor.on_write()
        if (is_write or has_effect) and self.faults.occurs(Fault.KILLED_AFTER):
            self._die(Fault.KILLED_AFTER)
        if has_call_faults and self.faults.occurs(Fault.ANSWER_LOST):
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

    async def _perform(self, call: str, act: Callable[[], Awaitable[T]]) -> T:
        try:
            return await act()
        except Exception as error:
            if _is_engine_failure(error):
                self.failed(call, str(error))
            raise

    def _latencies(self) -> tuple[float, float]:
        """The delays before the effect of a call, and between the effect and the answer."""
        if self.faults.occurs(Fault.CALL_SLOW):
            long_s, share = self.random.uniform(*SLOW_S), self.random.random()
            return long_s * share, long_s * (1.0 - share)
        if self.random.random() < NO_DELAY_SHARE:
            return 0.0, 0.0
        return self.random.uniform(0.0, self.latency_s), 0.0

    def _die(self, how: Fault) -> None:
        self.kill(how)
        raise Killed


def _is_engine_failure(error: Exception) -> bool:
    """Whether the error is a failure of the engine rather than an answer, such as a failed
    condition."""
    if isinstance(error, AwsError):
        return is_refused_for_now(error) or is_unknown(error)
    return isinstance(error, NoResponse | Unavailable | OSError)


Invoke = Callable[[FaultInjector, str, Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""How a call of a wrapped port reaches the engine."""


class _WrappedPort:
    """A port whose async methods pass `invoke`. Each method is wrapped on its first use."""

    def __init__(self, port: object, name: str, injector: FaultInjector, invoke: Invoke) -> None:
        self._port = port
        self._name = name
        self._injector = injector
        self._invoke = invoke

    def __getattr__(self, method: str) -> Any:
        target = getattr(self._port, method)
        if inspect.isasyncgenfunction(target):
            wrapped = _wrap_stream(target, f"{self._name}.{method}", self._injector, self._invoke)
        elif inspect.iscoroutinefunction(target):
            wrapped = _wrap_call(target, f"{self._name}.{method}", self._injector, self._invoke)
        else:
            wrapped = target
        self.__dict__[method] = wrapped
        return wrapped


async def _call_with_faults(
    injector: FaultInjector,
    call: str,
    act: Callable[[], Awaitable[T]],
    *,
    has_call_faults: bool | None = None,
) -> T:
    name, _, method = call.partition(".")
    is_write = method not in _WITHOUT_WRITES
    return await injector.call(
        name, method, act, is_write=is_write, has_call_faults=has_call_faults
    )


async def _call_without_faults(
    injector: FaultInjector, call: str, act: Callable[[], Awaitable[T]]
) -> T:
    injector.check()
    return await act()


def _wrap_call(
    target: Callable[..., Any], call: str, injector: FaultInjector, invoke: Invoke
) -> Any:
    method = call.partition(".")[2]

    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        async def act() -> Any:
            if method == "ack":
                refs = [(message.ref.run_id, message.ref.task_id) for message in args[0]]
                injector.monitor.on_ack(Acked(injector.name, refs))
            if method == "release":
                injector.monitor.history.released.update(args[0])
            if method == "receive" and injector.has_call_faults:
                answer = await _receive(injector, target, args, kwargs)
            else:
                answer = await target(*args, **kwargs)
            detail = describe(method, args, answer)
            injector.trace.note(injector.name, call, detail, is_minor=method in _MINOR)
            return answer

        if method in _HEARTBEATS and injector.faults.occurs(Fault.BEAT_SKIPPED):
            injector.trace.note(injector.name, call, "skipped")
            raise Unavailable(f"{call}: skipped")
        return await invoke(injector, call, act)

    return wrapped


async def _receive(
    injector: FaultInjector,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """A queue may return nothing although it has messages, return messages too early or too late,
    and deliver a message twice."""
    if injector.faults.occurs(Fault.FALSE_EMPTY):
        return []
    if injector.faults.occurs(Fault.EARLY_RETURN):
        kwargs = {
            **kwargs,
            "visibility_s": kwargs["visibility_s"] * injector.random.uniform(0.9, 1.1),
        }
    if injector.faults.occurs(Fault.DUPLICATE_DELIVERY):
        kwargs = {**kwargs, "visibility_s": 0.0}
    return await target(*args, **kwargs)


def _wrap_stream(
    target: Callable[..., Any], call: str, injector: FaultInjector, invoke: Invoke
) -> Any:
    async def wrapped(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        async with aclosing(target(*args, **kwargs)) as pieces:
            while True:
                try:
                    piece = await invoke(injector, call, lambda: anext(pieces))
                except StopAsyncIteration:
                    return
                injector.trace.note(injector.name, call, f"{len(piece)} bytes", is_minor=True)
                yield piece

    return wrapped
