"""Life: one incarnation of a process, through which each of its calls has to pass
(docs/simulator.md, How a world runs).

A dead process does nothing more: its calls have no effect and no answer, so that no clean-up of
its actors reaches anybody. A paused one is held up at its next call.
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

SLOW_S = (1.0, 30.0)
AT_ONCE = 0.7

_MINOR = frozenset(
    {"read", "find", "page_tasks", "receive", "count", "list_status", "depth", "put_status", "open"}
)
_BEATS = frozenset({"renew", "extend"})
_HARMLESS = _MINOR | {"upload_url", "download_url"}


class Killed(BaseException):
    """The process is dead. Not an Exception: nothing in the program may catch it."""


class InjectedCrash(Exception):
    """An error that no engine is supposed to raise: whichever actor made the call crashes."""


class Poison(InjectedCrash):
    """The input itself crashes its handler, each time that it is handled."""


@dataclass(slots=True, kw_only=True)
class ProcessFaults:
    """`scope` holds all that the process does. `refusal` is what an engine that is away raises.
    Where the engine has faults of its own, the life is not harsh as well: it is only short."""

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
        """The port as this process sees it. `is_harsh` where this port alone has no faults of its
        own."""
        enter = _through if is_harsh is None else partial(_through, is_harsh=is_harsh)
        return cast("P", _Guarded(port, name, self, enter))

    def noting(self, port: P, name: str) -> P:
        """The port, each call of which is noted; what is beneath it passes through us."""
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
        """One call: an effect, with whatever this world does before and after it. A write is an
        effect upon rows, after which somebody looks at them."""
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
        """The world made a call fail. There are many such: a reader looks at some of them."""
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
        """How long it takes until the effect, and from there to the answer."""
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
    """Whether a call failed by what an engine does in bad times; else the error is an answer."""
    if isinstance(error, AwsError):
        return is_refused_for_now(error) or is_unknown(error)
    return isinstance(error, NoResponse | Unavailable | OSError)


Enter = Callable[[ProcessFaults, str, Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""How a call of a port gets to the engine."""


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
    """Queues promise little: empty hands from a full queue, and messages that come twice."""
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
