"""Models the network between a caller and a service: delays and losses of requests and responses.

The effect of a call happens at one instant. The request before it and the response after it both
take time and may be lost. A request that is still on its way when its caller gives up takes effect
nevertheless.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, TypeVar

import trio

from conveyor.ports.clock import Clock
from conveyor.simulation.models.fault_source import FaultSource

T = TypeVar("T")
MakeError = Callable[[], Exception]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """How long the request and the response take, and how long the caller waits."""

    request_s: float
    response_s: float
    patience_s: float


@dataclass(slots=True, kw_only=True)
class Network:
    """`errors` are the exceptions of the service; they are ignored when nobody waits for the effect
    any more. `refusals` are raised before an effect, `losses` after it."""

    clock: Clock
    fault_source: FaultSource
    errors: tuple[type[Exception], ...]
    _late: list[tuple[float, int, Callable[[], Any]]] = field(default_factory=list)
    _number: int = 0

    async def send(
        self,
        delay: Delay,
        effect: Callable[[], T],
        *,
        refusals: Sequence[MakeError],
        losses: Sequence[MakeError],
        too_late: MakeError,
        wait: Callable[[], Awaitable[T]] | None = None,
    ) -> T:
        """Makes one call: applies `effect` and returns its answer. `wait` is used instead where the
        service itself waits, as in a long poll."""
        await trio.lowlevel.checkpoint()
        self.apply_late()
        ends_at = trio.current_time() + delay.patience_s
        faults = self.fault_source.service_rates.calls
        await self._send_request(delay, effect, ends_at, too_late)
        if self.fault_source.occurs("call.refused", faults.refused_rate):
            raise self.fault_source.one_of(refusals)()
        answer = effect() if wait is None else await wait()
        if not await _is_in_time(delay.response_s, ends_at):
            raise too_late()
        if self.fault_source.occurs("call.lost", faults.lost_rate):
            raise self.fault_source.one_of(losses)()
        return answer

    def draw_delay(self, patience_s: float, *, slow_s: float = 0.0) -> Delay:
        """Draws how long the request and the response of one call take."""
        fault_source, faults = self.fault_source, self.fault_source.service_rates.calls
        request_s = fault_source.seconds(faults.latency_s) / 2
        response_s = fault_source.seconds(faults.latency_s) / 2 + slow_s
        if fault_source.occurs("call.slow", faults.slow_rate):
            more_s, share = fault_source.seconds(faults.slow_s), fault_source.seconds((0.0, 1.0))
            request_s, response_s = request_s + share * more_s, response_s + (1 - share) * more_s
        if fault_source.occurs("call.stalled", faults.stalled_rate):
            response_s += max(patience_s, fault_source.seconds(faults.stalled_s))
        if fault_source.occurs("call.late", faults.late_rate):
            request_s += patience_s + fault_source.seconds(faults.late_s)
        return Delay(request_s=request_s, response_s=response_s, patience_s=patience_s)

    def apply_late(self) -> None:
        """Applies the effects of calls whose callers gave up, if the requests have arrived by
        now."""
        while self._late and self._late[0][0] <= self.clock.now():
            with suppress(*self.errors):
                heappop(self._late)[2]()

    async def _send_request(
        self, delay: Delay, effect: Callable[[], object], ends_at: float, too_late: MakeError
    ) -> None:
        if not delay.request_s:
            return
        arrives_at = self.clock.now() + delay.request_s
        is_received = False
        try:
            is_received = await _is_in_time(delay.request_s, ends_at)
        finally:
            if not is_received:
                self._number += 1
                heappush(self._late, (arrives_at, self._number, effect))
        if not is_received:
            raise too_late()


async def _is_in_time(seconds: float, ends_at: float) -> bool:
    left_s = ends_at - trio.current_time()
    if seconds:
        await trio.sleep(min(seconds, max(0.0, left_s)))
    return seconds < left_s
