"""ApiKeyLimiter: the calls that are made with one API key, and the permits for them
(docs/engines.md, Gateways).

A poller takes a permit before it receives a message. A permit is held, calling or over. An
interrupted call keeps its permit and its lease until its deadline, because the gateway continues it
and counts it against the limit.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

import msgspec
import trio

from conveyor.domain import limits
from conveyor.domain.backpressure.call_window import CallWindow
from conveyor.domain.backpressure.circuit import Circuit
from conveyor.domain.backpressure.gateway_health import GatewayHealth
from conveyor.domain.ids import CallerId, JobId, LeaseId, RunId
from conveyor.domain.run.wait_reason import WaitReason
from conveyor.domain.submit.target import host_of
from conveyor.domain.timing import cooldown_s
from conveyor.ports.errors import Unavailable
from conveyor.ports.gateway import Contact, Deferred, GatewayReport, NotScraped, Outcome, Scraped
from conveyor.telemetry import Metrics
from conveyor.usecases.context import Context

log = logging.getLogger(__name__)

# Bounds the shielded acquire of leases. A longer time delays the stop of a poller.
ACQUIRE_TIMEOUT_S = 10.0
# An idle lease is reused within this time or released. A longer time keeps other processes from the
# limit; a shorter one costs more calls to the coordinator.
IDLE_LEASE_S = 1.0
# A refused call is deferred for at least this long, so that its message is not received in vain.
DEFER_S_MIN = 0.5
NO_LIMIT = "none"
_HEALTHY = GatewayHealth()
# Callers whose gateway health is kept for one key. Beyond it, callers with a closed circuit are
# dropped; they start again as healthy.
HEALTHS_MAX = 10_000


@dataclass(slots=True, eq=False)
class CallPermit:
    """The right to make one call. `start` and `finish` enclose the call; `close` is called in every
    case."""

    limiter: ApiKeyLimiter
    caller: CallerId
    run_id: RunId
    probe: int | None = None
    lease_id: LeaseId | None = None
    began_at: float | None = None
    is_over: bool = False
    is_kept: bool = False

    def start(self) -> None:
        self.began_at = trio.current_time()

    def finish(self, outcome: Outcome, url: str) -> Outcome:
        """Ends the call with an outcome. A failure of the gateway, which is not the task's, becomes
        a deferral."""
        self.is_over = True
        return self.limiter.judge(self, outcome, url)

    def end_crashed(self) -> None:
        """Ends a call whose answer crashed its handler: nothing is known about the gateway."""
        if not self.is_over:
            self.is_over = True
            self.limiter.release(self)

    def close(self) -> None:
        """Releases an unused permit, or marks an interrupted call as abandoned. After `finish` it
        does nothing."""
        if self.is_over:
            return
        self.is_over = True
        if self.began_at is None:
            self.limiter.release(self)
        else:
            self.limiter.abandon(self)


@dataclass(slots=True, eq=False)
class _Waiter:
    caller: CallerId
    run_id: RunId
    weight: int
    permits: list[CallPermit] = field(default_factory=list)
    ready: trio.Event = field(default_factory=trio.Event)


class ApiKeyLimiter:
    """The calls that are made with one API key. `pool` is the pool of its leases.

    The window belongs to the key. The gateway's health is kept per caller, even if all callers
    share one key: failing targets of one caller must not stop the calls of another.
    """

    def __init__(self, env: Context, metrics: Metrics, name: str) -> None:
        self.window = CallWindow()
        self.healths: dict[CallerId, GatewayHealth] = {}
        self.name = name
        self.pool = JobId(f"gateway-{name}")
        self.used_at = trio.current_time()
        self.idle_leases: dict[LeaseId, float] = {}
        self.leases: set[LeaseId] = set()
        self.abandoned: dict[CallPermit, float] = {}
        self._env = env
        self._metrics = metrics
        self.published_limit: str | None = None
        self._first_began_at: float | None = None
        self._full_until = 0.0
        self._refusals_in_row = 0
        self._waiters: list[_Waiter] = []
        self._by_run: Counter[RunId] = Counter()
        self._inflight = 0

    @property
    def inflight_count(self) -> int:
        """Permits that are held or calling, plus interrupted calls that the gateway continues."""
        self._forget_abandoned()
        return self._inflight + len(self.abandoned)

    @property
    def is_idle(self) -> bool:
        return not (self._inflight or self._waiters or self.abandoned or self.leases)

    def health_of(self, caller: CallerId) -> GatewayHealth:
        return self.healths.get(caller, _HEALTHY)

    def is_open(self, caller: CallerId) -> bool:
        """Returns whether the gateway accepts calls: it is available and has requested no pause."""
        is_available = self.health_of(caller).circuit.is_closed
        return is_available and self.window.resume_at <= trio.current_time()

    def reason_for(self, caller: CallerId) -> WaitReason:
        """Returns the reason for which calls of this caller wait."""
        is_available = self.health_of(caller).circuit.is_closed
        return WaitReason.GATEWAY_LIMIT if is_available else WaitReason.GATEWAY_UNAVAILABLE

    @property
    def is_shared(self) -> bool:
        """Returns whether all processes together keep to the limit: from the first call on, until
        an answer shows that the gateway states none."""
        return self.window.limit is not None or not self.window.is_answered

    def take_nowait(self, caller: CallerId, run_id: RunId, *, count_max: int) -> list[CallPermit]:
        """Takes permits that are available at once; none while other runs wait."""
        self.used_at = trio.current_time()
        # Waiters whose gateway is unavailable do not count: they cannot use the room.
        is_behind = any(self.is_open(waiter.caller) for waiter in self._waiters)
        return [] if is_behind else self._admit(caller, run_id, count_max)

    async def acquire(self, caller: CallerId, run_id: RunId, *, weight: int) -> list[CallPermit]:
        """Waits for one permit."""
        waiter = _Waiter(caller, run_id, weight)
        self._waiters.append(waiter)
        try:
            self.grant()
            await waiter.ready.wait()
        except BaseException:
            # Cancelled after the grant and before the wake-up: return the permit.
            for permit in waiter.permits:
                permit.close()
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            self.used_at = trio.current_time()
        return waiter.permits

    def grant(self) -> None:
        """Gives free permits to waiters, first to the run with the fewest calls for its weight.
        Each waiter gets one; after it has woken it may take more."""
        while self._waiters and self.room_count:
            # Sort again after each grant, because each grant changes the shares.
            for waiter in sorted(self._waiters, key=self._share):
                waiter.permits += self._admit(waiter.caller, waiter.run_id, 1)
                if waiter.permits:
                    self._waiters.remove(waiter)
                    waiter.ready.set()
                    break
            else:
                return

    def adopt_limit(self, texts: Sequence[str]) -> None:
        """Takes over the limit that other processes have published, as long as this process has no
        answer of its own."""
        if texts and not self.window.is_answered:
            # The smallest: a process may have published a limit that has been lowered since.
            stated = [int(text) for text in texts if text.isdecimal()]
            self.window = msgspec.structs.replace(
                self.window, limit=min(stated, default=None), is_answered=True
            )

    @property
    def limit_text(self) -> str | None:
        """The stated limit as a text for other processes; None before the first answer."""
        if not self.window.is_answered:
            return None
        return NO_LIMIT if self.window.limit is None else str(self.window.limit)

    @property
    def room_count(self) -> int:
        """Returns how many calls could begin now: within the window, and with idle leases or
        leases that the coordinator may grant."""
        now = trio.current_time()
        # While nothing is answered, the window grows slowly with time: a slow first page must not
        # hold back all others.
        if self._first_began_at is not None:
            self.window = self.window.wait_unanswered(now - self._first_began_at)
        room = self.window.room(self.inflight_count, now=now)
        if self.is_shared and now < self._full_until:
            return min(room, len(self.idle_leases))
        return room

    async def lease(self, permits: list[CallPermit]) -> list[CallPermit]:
        """Returns the permits for which the limit of all processes together has room; closes the
        others."""
        if not self.is_shared:
            return permits
        for permit in permits:
            # Reuse idle leases first: each acquire is a call to the coordinator.
            if self.idle_leases:
                permit.lease_id = self.idle_leases.popitem()[0]
        unleased = [permit for permit in permits if permit.lease_id is None]
        try:
            for permit, lease_id in zip(unleased, await self._acquire(len(unleased)), strict=False):
                permit.lease_id = lease_id
        except BaseException:
            for permit in permits:
                permit.close()
            raise
        self._note_refused(sum(permit.lease_id is None for permit in permits))
        for permit in permits:
            if permit.lease_id is None:
                permit.close()
        return [permit for permit in permits if permit.lease_id is not None]

    def _note_refused(self, count: int) -> None:
        """Other processes hold the leases. Sets the time before which no waiter of this process
        requests leases again; it grows with each refusal in a row."""
        if count == 0:
            self._refusals_in_row = 0
            return
        wait_s = cooldown_s(self._refusals_in_row, self._env.random)
        self._full_until = trio.current_time() + wait_s
        self._refusals_in_row += 1

    async def _acquire(self, count: int) -> list[LeaseId]:
        """Acquires leases, shielded: if the call were cancelled, granted leases that no permit
        records would take up room until they age out."""
        if count == 0:
            return []
        limit = self.window.limit
        # Before the first answer no limit is known, and the window is the only bound.
        cap = self.window.capacity if limit is None else limit
        with trio.move_on_after(ACQUIRE_TIMEOUT_S, shield=True):
            leases = await self._env.coordinator.acquire(
                self.pool,
                RunId(f"calls-{self.name}"),
                count_max=count,
                cap=cap,
                ttl_s=limits.LEASE_TTL_S,
            )
            self.leases.update(leases)
            return leases
        raise Unavailable("the coordinator took too long over an acquire")

    def judge(self, permit: CallPermit, outcome: Outcome, url: str) -> Outcome:
        """Updates the window and the caller's health by an outcome. Returns the outcome to apply to
        the task."""
        # Count before the drop: the window compares the limit with the calls in flight including
        # this one.
        inflight = self.inflight_count
        self._drop(permit)
        report = None if isinstance(outcome, Deferred) else outcome.report
        if report is None or isinstance(outcome, Deferred):
            # Without a report the call proves nothing about the gateway, so another call may be the
            # probe.
            self._return_probe(permit)
            self.grant()
            return outcome
        try:
            return self._judge(permit, outcome, report, (url, inflight))
        finally:
            self.grant()

    def _judge(
        self,
        permit: CallPermit,
        outcome: Scraped | NotScraped,
        report: GatewayReport,
        call: tuple[str, int],
    ) -> Outcome:
        url, inflight = call
        now, random = trio.current_time(), self._env.random
        began_at = now if permit.began_at is None else permit.began_at
        before = self.health_of(permit.caller)
        match report.contact:
            case Contact.ANSWERED:
                health = before.note_answer(began_at=began_at, target=_digest(url))
                self.window = self.window.note_answer(
                    limit=report.limit, remaining=report.remaining, inflight=inflight, now=now
                )
                judged: Outcome = outcome
            case Contact.REFUSED:
                # A refusal proves that the gateway is available, but says nothing about the target.
                health = before.note_answer(began_at=began_at)
                self.window = self.window.note_refusal(
                    limit=report.limit,
                    inflight=inflight,
                    began_at=began_at,
                    now=now,
                    retry_after_s=report.retry_after_s,
                    random=random,
                )
                self._metrics.gateway.refusals.inc()
                wait_s = max(self.window.resume_at - now, DEFER_S_MIN)
                judged = self._defer(outcome, WaitReason.GATEWAY_LIMIT, wait_s)
            case Contact.UNREACHABLE:
                health = before.note_unreachable(now=now, probe=permit.probe, random=random)
                wait_s = max(health.circuit.wait_s(now), DEFER_S_MIN)
                judged = self._defer(outcome, WaitReason.GATEWAY_UNAVAILABLE, wait_s)
            case Contact.FAILED:
                host, target = host_of(url) or "", _digest(url)
                health, is_at_fault = before.note_failure(
                    target,
                    host,
                    began_at=began_at,
                    now=now,
                    probe=permit.probe,
                    random=random,
                )
                judged = outcome
                if not is_at_fault:
                    wait_s = health.retry_after_s(target, now=now)
                    judged = self._defer(outcome, WaitReason.GATEWAY_UNAVAILABLE, wait_s)
            case _:
                assert_never(report.contact)
        # Before the insert, so that the current caller is kept.
        if len(self.healths) >= HEALTHS_MAX:
            self.healths = {
                caller: other
                for caller, other in self.healths.items()
                if not other.circuit.is_closed
            }
        self.healths[permit.caller] = health
        self._note_circuit(before, health, outcome)
        return judged

    def _defer(self, outcome: Outcome, reason: WaitReason, retry_after_s: float) -> Outcome:
        if not isinstance(outcome, NotScraped):
            # A page is a success, whatever the report says.
            return outcome
        self._metrics.gateway.deferred.labels(reason.value).inc()
        return Deferred(
            reason=reason,
            detail=outcome.problem.detail or outcome.problem.title,
            retry_after_s=retry_after_s,
            credits=outcome.credits,
            cost_micros=outcome.cost_micros,
            cost_known=outcome.cost_known,
        )

    def _note_circuit(
        self, before: GatewayHealth, health: GatewayHealth, outcome: Scraped | NotScraped
    ) -> None:
        if health.circuit.is_closed == before.circuit.is_closed:
            return
        if not health.circuit.is_closed:
            if not any(other.circuit.is_closed for other in self.healths.values()):
                # No caller's circuit is closed: after the outage the load must grow again step by
                # step. If another caller's calls succeed, the window is still right.
                self.window = self.window.restart()
            cause = outcome.problem.code if isinstance(outcome, NotScraped) else ""
            log.warning("gateway unavailable: calls wait", extra={"cause": cause})
        else:
            log.warning("gateway available again")

    def release(self, permit: CallPermit) -> None:
        """Returns a permit whose call was not made, or has ended without an outcome."""
        self._drop(permit)
        self._return_probe(permit)
        self.grant()

    def abandon(self, permit: CallPermit) -> None:
        """Marks an interrupted call. It counts until its deadline, because the gateway continues
        it."""
        assert permit.began_at is not None
        self._inflight -= 1
        self._uncount(permit.run_id)
        self.abandoned[permit] = permit.began_at + limits.SCRAPE_DEADLINE_S
        if permit.probe is not None:
            circuit = self.health_of(permit.caller).circuit
            self._set_circuit(
                permit.caller,
                circuit.abandon_probe(
                    permit.probe, now=trio.current_time(), random=self._env.random
                ),
            )
        self.grant()

    async def keep_abandoned(self, run_id: RunId) -> int:
        """Extends the leases of interrupted calls to their deadlines, so that they count even if
        this process ends. Returns the number of such calls of the run."""
        self._forget_abandoned()
        await self.keep_leases_of_abandoned()
        return sum(permit.run_id == run_id for permit in self.abandoned)

    async def keep_leases_of_abandoned(self) -> None:
        new = [permit for permit in self.abandoned if permit.lease_id and not permit.is_kept]
        if new:
            lease_ids = [permit.lease_id for permit in new if permit.lease_id is not None]
            # Once is enough: no call outlasts SCRAPE_DEADLINE_S, so the lease lives at least as
            # long as the call.
            await self._env.coordinator.renew(lease_ids, ttl_s=limits.SCRAPE_DEADLINE_S)
            for permit in new:
                permit.is_kept = True

    def pop_unused(self) -> list[LeaseId]:
        """Removes and returns idle leases that no call has needed for IDLE_LEASE_S, or that exceed
        the limit."""
        now, cap = trio.current_time(), self.window.limit or self.window.capacity
        unused = [
            lease_id
            for lease_id, at in self.idle_leases.items()
            if at + IDLE_LEASE_S <= now or len(self.leases) > cap or not self.is_shared
        ]
        for lease_id in unused:
            self.forget_lease(lease_id)
        return unused

    def live_leases(self) -> list[LeaseId]:
        """Returns the leases to renew. Leases of interrupted calls are excluded: a renewal by
        LEASE_TTL_S would shorten their lives."""
        abandoned_ids = {permit.lease_id for permit in self.abandoned}
        return sorted(lease_id for lease_id in self.leases if lease_id not in abandoned_ids)

    def forget_lease(self, lease_id: LeaseId) -> None:
        """Forgets a lease that was released or has aged out. A call under it continues."""
        self.leases.discard(lease_id)
        self.idle_leases.pop(lease_id, None)

    def _admit(self, caller: CallerId, run_id: RunId, count_max: int) -> list[CallPermit]:
        count = min(count_max, self.room_count)
        circuit = self.health_of(caller).circuit
        if count < 1:
            return []
        if not circuit.is_closed:
            # While the circuit is open, a caller gets one permit at a time, as a probe.
            started = circuit.start_probe(now=trio.current_time())
            if started is None:
                return []
            self._set_circuit(caller, started)
            permits = [CallPermit(self, caller, run_id, probe=started.probe)]
        else:
            permits = [CallPermit(self, caller, run_id) for _ in range(count)]
        self._inflight += len(permits)
        self._by_run[run_id] += len(permits)
        if self._first_began_at is None:
            self._first_began_at = trio.current_time()
        return permits

    def _drop(self, permit: CallPermit) -> None:
        self._inflight -= 1
        self._uncount(permit.run_id)
        if permit.lease_id is not None and permit.lease_id in self.leases:
            # Keep the lease for the next call instead of releasing it.
            self.idle_leases[permit.lease_id] = trio.current_time()

    def _uncount(self, run_id: RunId) -> None:
        self._by_run[run_id] -= 1
        if not self._by_run[run_id]:
            del self._by_run[run_id]

    def _return_probe(self, permit: CallPermit) -> None:
        if permit.probe is not None:
            circuit = self.health_of(permit.caller).circuit
            self._set_circuit(
                permit.caller, circuit.return_probe(permit.probe, now=trio.current_time())
            )

    def _set_circuit(self, caller: CallerId, circuit: Circuit) -> None:
        health = self.health_of(caller)
        self.healths[caller] = msgspec.structs.replace(health, circuit=circuit)

    def _forget_abandoned(self) -> None:
        now = trio.current_time()
        for permit in [call for call, until in self.abandoned.items() if until <= now]:
            del self.abandoned[permit]
            if permit.lease_id is not None:
                self.forget_lease(permit.lease_id)

    def _share(self, waiter: _Waiter) -> float:
        return self._by_run[waiter.run_id] / waiter.weight


def _digest(url: str) -> str:
    """Returns a short name of a target. URLs are long, and the health keeps many of them."""
    return hashlib.blake2b(url.encode(errors="replace"), digest_size=8).hexdigest()
