"""CompletionNotifier: delivers the events of the outbox (SPEC.md 4.16).

Owns:    the delivery attempts in progress, and what is known about the receivers.
Hears:   nothing: the outbox is the queue, which is queried every `period_s` and when room appears.
Says:    nothing.
Crashes: only by bug. An event that was delivered but not recorded is delivered again with the same
         id. Knowledge about receivers is lost and learned again.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import trio

from actors.worker_roster import Roster
from conveyor.domain.ids import CallerId, NoticeId
from conveyor.domain.model import Notice
from conveyor.domain.timing import backoff_s
from conveyor.ports.errors import Unavailable
from conveyor.ports.tracer import SpanKind, SpanRecord
from conveyor.ports.webhook_sender import WebhookSender
from conveyor.telemetry import Metrics
from conveyor.usecases import webhook
from conveyor.usecases.context import Context
from conveyor.usecases.crash_isolation import Crash, isolate
from conveyor.usecases.webhook import DeferredDelivery, DeliveryOutcome, DueDelivery

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _DeliveryState:
    """The state of one incarnation."""

    limiter: DeliveryLimiter
    under_way: set[NoticeId] = field(default_factory=set)
    room_made: trio.Event = field(default_factory=trio.Event)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionNotifier:
    env: Context
    notifier: WebhookSender
    roster: Roster = field(default_factory=Roster.of_one)
    period_s: float = 1.0
    metrics: Metrics | None = None
    # Due events per query. Events behind a full page are seen only if those on it are started or
    # postponed.
    page_max: int = 100
    # Nested limits: a slow receiver may use 4 of the 16 attempts of its caller, and a caller 16 of
    # all 64.
    at_once_max: int = 64
    per_caller_max: int = 16
    per_receiver_max: int = 4

    async def run(self) -> None:
        state = _DeliveryState(
            DeliveryLimiter(
                at_once_max=self.at_once_max,
                per_caller_max=self.per_caller_max,
                per_receiver_max=self.per_receiver_max,
            )
        )
        async with trio.open_nursery() as nursery:
            while True:
                # Before the query: an attempt that ends during the query sets the new event, so it
                # is not missed.
                state.room_made = trio.Event()
                try:
                    has_postponed = await self._start_due(state, nursery)
                except Unavailable as error:
                    log.warning("outbox not read", extra={"cause": str(error)})
                    has_postponed = False
                if not has_postponed:
                    await self._wait_for_turn(state)

    async def _wait_for_turn(self, state: _DeliveryState) -> None:
        """Waits for the next query, or until an attempt has ended and made room for others."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._wait_room_made, state, nursery.cancel_scope)
            await self.roster.wait_turn("deliveries", self.period_s)
            nursery.cancel_scope.cancel()

    async def _wait_room_made(self, state: _DeliveryState, turn: trio.CancelScope) -> None:
        await state.room_made.wait()
        turn.cancel()

    async def _start_due(self, state: _DeliveryState, nursery: trio.Nursery) -> bool:
        """Starts the attempts that may start. On a full page, events that may not start are
        postponed, because others behind them would not be seen. Returns whether some were postponed
        for that reason."""
        page = await webhook.due(self.env, limit=self.page_max)
        is_full_page = len(page) == self.page_max
        postponed: list[DeferredDelivery] = []
        for notice in page:
            if state.limiter.is_full:
                break
            # A claimed event is still due until its claim is written, so a query may return it
            # again.
            if notice.notice_id in state.under_way:
                continue
            ready = await self._prepare(notice)
            if ready is None:
                continue
            now_s = trio.current_time()
            not_before = state.limiter.acquire(ready.job.caller, ready.receiver, now_s=now_s)
            if not_before is None:
                state.under_way.add(notice.notice_id)
                nursery.start_soon(self._deliver, ready, state)
            # Otherwise the event stays due: postponing costs a write, and the page has room.
            elif not_before.is_deferred or is_full_page:
                until = self.env.now() + not_before.at_s - now_s
                postponed.append(DeferredDelivery(notice, until, not_before.is_deferred))
        await webhook.postpone(self.env, postponed)
        return is_full_page and bool(postponed)

    async def _prepare(self, notice: Notice) -> DueDelivery | None:
        fields = {"event": notice.notice_id}
        ready = await isolate(partial(webhook.prepare, self.env, notice), "a notice", extra=fields)
        if isinstance(ready, Crash):
            await webhook.fail_crashed(self.env, notice)
            return None
        return ready

    async def _deliver(self, ready: DueDelivery, state: _DeliveryState) -> None:
        outcome = None
        fields = {"event": ready.notice.notice_id}
        try:
            deliver = partial(webhook.deliver, self.env, self.notifier, ready)
            done = await isolate(deliver, "a notice", extra=fields)
            if isinstance(done, Crash):
                await webhook.fail_crashed(self.env, ready.notice)
            else:
                outcome = done
        except Unavailable as error:
            log.warning("delivery not recorded", extra={"cause": str(error)})
        else:
            self._count(ready, outcome)
        finally:
            state.under_way.discard(ready.notice.notice_id)
            state.limiter.release(
                ready.job.caller, ready.receiver, outcome, now_s=trio.current_time()
            )
            # Wakes the loop: another event of this receiver may be waiting.
            state.room_made.set()

    def _count(self, ready: DueDelivery, outcome: DeliveryOutcome | None) -> None:
        is_delivered = outcome is not None and outcome.is_delivered
        if self.env.tracer is not None and outcome is not None:
            now = self.env.now()
            span = SpanRecord(
                name="deliver webhook",
                kind=SpanKind.CLIENT,
                started_at=now - outcome.duration_s,
                ended_at=now,
                attributes={"conveyor.event": ready.notice.event_type},
                is_error=not is_delivered,
                run_id=ready.notice.run_id,
            )
            self.env.tracer.record(span)
        if self.metrics is not None:
            self.metrics.webhook_deliveries.labels("delivered" if is_delivered else "failed").inc()
        if not is_delivered:
            notice = ready.notice
            log.warning(
                "webhook event not delivered",
                extra={
                    "event": notice.notice_id,
                    "job": notice.job_id,
                    "run": notice.run_id,
                    "attempts": notice.attempts + 1,
                    "cause": "crash" if outcome is None else outcome.error,
                },
            )


# DeliveryLimiter: how many attempts run at once to one receiver, and to all receivers of one caller
# (SPEC.md 4.16).
#
# A receiver that fails repeatedly is deferred: for a growing time it gets no attempt, then one
# probe at a time, until a delivery succeeds. So neither a dead nor a slow receiver uses the room of
# others. It measures time by Trio's clock: after the wall clock is set back, a probe must not wait
# until that has caught up.


# Failures in a row after which a receiver gets single probes only.
DEFERRED_AFTER = 3
# First and longest time between probes. A longer time delays events after the receiver has
# recovered; a shorter one costs more attempts.
PROBE_S, PROBE_S_MAX = 30.0, 600.0
# Longest time for which an event is postponed for lack of room, so that a wrong estimate of the
# duration does not delay it further.
NOT_BEFORE_S_MAX = 60.0
# Receivers that are remembered. Beyond it the oldest idle one is forgotten and starts without
# failures.
RECEIVERS_MAX = 4096

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class NotBefore:
    """There is no room before `at_s`."""

    at_s: float
    is_deferred: bool = False


@dataclass(slots=True)
class _ReceiverState:
    width: int
    inflight: int = 0
    failures: int = 0
    probe_at_s: float = 0.0
    duration_s: float = 0.1
    booked_until_s: float = 0.0

    @property
    def is_deferred(self) -> bool:
        return self.failures >= DEFERRED_AFTER

    def has_room(self, now_s: float) -> bool:
        if self.is_deferred:
            return self.inflight == 0 and now_s >= self.probe_at_s
        return self.inflight < self.width

    def next_slot(self, now_s: float) -> NotBefore:
        """Returns the next free time, estimated by the duration of attempts to this receiver."""
        begin_s = max(now_s, self.probe_at_s)
        booked_s = max(begin_s, self.booked_until_s) + self.duration_s / self.width
        self.booked_until_s = min(booked_s, begin_s + NOT_BEFORE_S_MAX)
        return NotBefore(self.booked_until_s, self.is_deferred)

    def record_success(self, duration_s: float) -> None:
        self.duration_s = duration_s
        self.failures, self.probe_at_s, self.booked_until_s = 0, 0.0, 0.0

    def record_failure(self, now_s: float, duration_s: float) -> None:
        self.duration_s = duration_s
        self.failures += 1
        if self.is_deferred:
            doublings = self.failures - DEFERRED_AFTER
            self.probe_at_s = now_s + backoff_s(doublings, first_s=PROBE_S, delay_s_max=PROBE_S_MAX)


class DeliveryLimiter:
    """State for each caller, and for each pair of caller and URL, while there is something to
    remember."""

    def __init__(self, *, at_once_max: int, per_caller_max: int, per_receiver_max: int) -> None:
        assert 1 <= per_receiver_max <= per_caller_max <= at_once_max
        self._room = at_once_max
        self._per_caller_max = per_caller_max
        self._per_receiver_max = per_receiver_max
        self._callers: dict[CallerId, _ReceiverState] = {}
        self._receivers: dict[tuple[CallerId, str], _ReceiverState] = {}

    @property
    def is_full(self) -> bool:
        return self._room == 0

    def acquire(self, caller: CallerId, url: str, *, now_s: float) -> NotBefore | None:
        """Takes the room for one attempt and returns None, or returns when to try again."""
        assert not self.is_full
        caller_state = self._callers.setdefault(caller, _ReceiverState(self._per_caller_max))
        state = self._receivers.setdefault((caller, url), _ReceiverState(self._per_receiver_max))
        full = next((limit for limit in (state, caller_state) if not limit.has_room(now_s)), None)
        if full is not None:
            not_before = full.next_slot(now_s)
            self._forget_idle(caller, url)
            return not_before
        self._room -= 1
        caller_state.inflight += 1
        state.inflight += 1
        return None

    def release(
        self, caller: CallerId, url: str, outcome: DeliveryOutcome | None, *, now_s: float
    ) -> None:
        """Returns the room, and records the outcome if there was an attempt."""
        caller_state, state = self._callers[caller], self._receivers[caller, url]
        self._room += 1
        caller_state.inflight -= 1
        state.inflight -= 1
        if outcome is not None:
            # A failure of one receiver must not defer the other receivers of its caller, so the
            # caller's state records the duration only.
            caller_state.record_success(outcome.duration_s)
            if outcome.is_delivered:
                state.record_success(outcome.duration_s)
            else:
                state.record_failure(now_s, outcome.duration_s)
        self._forget_idle(caller, url)

    def _forget_idle(self, caller: CallerId, url: str) -> None:
        _forget(self._callers, caller)
        _forget(self._receivers, (caller, url))


def _forget(states: dict[K, _ReceiverState], key: K) -> None:
    """Removes an idle state without failures. If there are too many states, removes the oldest idle
    one."""
    if not (states[key].inflight or states[key].failures):
        del states[key]
    if len(states) > RECEIVERS_MAX:
        del states[next(key for key, state in states.items() if not state.inflight)]
