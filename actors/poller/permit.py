"""Permits: what a task of a run must hold before it may fetch (SPEC.md 4.6).

A `Permit` is one object for everything that one task occupies:

- a call permit of the API key, where a remote gateway makes the calls;
- a slot of this process, shared fairly between callers;
- a lease of the job, which caps its tasks in flight over all processes;
- a lease of the task's host, where the job has host limits;
- a reservation in the budget of the run, where it has a budget.

`PermitPool.acquire` takes the first three before a message is received; its comments state the
order and the reason. The poller adds the other two, because they depend on the task.
As soon as the page has arrived, `Permit.release_early` passes slot and lease on, and
`Permit.release_host` releases the lease at the host. `Permit.release` releases what is left.

The reservation of a poller is written to the store before any call begins. So the run as a whole
never spends more than its budget, whichever process is killed at whichever point (SPEC.md 4.9).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import trio

from actors.limiters.api_key_limiter import CallPermit
from actors.limiters.call_limiter import CallLimiter
from actors.limiters.fair_limiter import FairLimiter, Preemptible
from actors.limiters.storage_breaker import StorageBreaker
from actors.poller.host_limiter import HostLimiter
from actors.runtime import bounded_cleanup
from conveyor.domain import limits
from conveyor.domain.backpressure import reservation
from conveyor.domain.budget import Budget, BudgetReservation, Price, Unit
from conveyor.domain.changes import Applied, BudgetKey, Missing, RunKey, Verdict
from conveyor.domain.ids import LeaseId, RunId
from conveyor.domain.lifecycle import RUN_LIVE
from conveyor.domain.model import Job, Run
from conveyor.domain.run.wait_reason import WaitReason
from conveyor.domain.timing import cooldown_s, permits_to_request
from conveyor.ports.errors import Unavailable
from conveyor.ports.gateway import Outcome
from conveyor.telemetry import Metrics
from conveyor.usecases.context import Context

log = logging.getLogger(__name__)

# Bounds the shielded acquire of leases. A longer time delays the stop of a poller.
ACQUIRE_TIMEOUT_S = 10.0
# How long the release of a host lease may take at the end of a task. After it, the lease expires.
CLEANUP_S = 3.0
# An idle lease may be reused while it still survives two heartbeats: the first heartbeat of its new
# task may be missed.
REUSE_S_MAX = limits.LEASE_TTL_S - 2 * limits.HEARTBEAT_S - 1.0
# A poller that waits for a call permit reports its wait reason again after this time.
REPORT_S = 5.0
# Other pollers of the run change the same budget row, and each lost race costs one try. After the
# last try the calls count as unaffordable, and the poller tries again later.
_TRIES = 20


class Wakeup:
    """An event that each wait clears. It wakes the poll loop early."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self, timeout_s: float) -> None:
        # A deadline may pass while the caller releases leases, and Trio refuses negative times.
        with trio.move_on_after(max(timeout_s, 0.0)):
            await self._event.wait()
        self._event = trio.Event()


@dataclass(slots=True, eq=False)
class Permit:
    """Everything that one task occupies while it runs. `call`, `host_lease_id` and `reservation`
    are None where the gateway, the job or the run has no such limit.

    `is_funded` is False if the run has a budget and it cannot pay for the call.
    """

    pool: PermitPool
    lease_id: LeaseId
    call: CallPermit | None = None
    host: str | None = None
    host_lease_id: LeaseId | None = None
    reservation: CallReservation | None = None
    is_funded: bool = True
    _fetch: Preemptible | None = None
    _called_at: float | None = None
    _is_writing: bool = False

    def allow_preemption(self, scope: trio.CancelScope, *, receives: int) -> None:
        """Lets the limiter cancel `scope` when a caller with fewer slots has waited for long."""
        self._fetch = self.pool.limiter.allow_preemption(
            self.pool.job.caller,
            lambda: scope.cancel(reason="a caller with fewer slots waits"),
            receives=receives,
        )

    def start_call(self) -> None:
        """Marks the start of the gateway call. From here on it counts at its full price, because an
        interrupted call may have been billed."""
        self._called_at = trio.current_time()
        if self.reservation is not None:
            self.reservation.start()
        if self.call is not None:
            self.call.start()

    def finish_call(self, outcome: Outcome, url: str) -> Outcome:
        """Records the outcome of the gateway call. Returns the outcome to apply to the task: a
        failure of the gateway, which is not the task's, becomes a deferral."""
        if self.call is not None:
            outcome = self.call.finish(outcome, url)
        if self.reservation is not None:
            self.reservation.finish(outcome)
        return outcome

    def end_crashed_call(self) -> None:
        """Ends the gateway call without an outcome. It keeps its full price."""
        if self.call is not None:
            self.call.end_crashed()

    def release_early(self) -> bool:
        """Passes slot and lease on to the next task: the page has arrived and only has to be
        written. Returns False if too many tasks are writing already. Ends preemption."""
        self._forbid_preemption()
        self._is_writing = self.pool.limiter.begin_write(self.pool.job.caller, self.pool.run_id)
        if self._is_writing:
            self.pool.pass_on(self.lease_id)
        return self._is_writing

    async def release_host(self) -> None:
        """Releases the lease at the host, if the task holds one. The limit of a host counts
        requests, and writing a page may take longer than its request. If the call fails, the lease
        expires."""
        lease_id, self.host_lease_id = self.host_lease_id, None
        if lease_id is None:
            return
        fetch_s = None if self._called_at is None else trio.current_time() - self._called_at
        with bounded_cleanup(CLEANUP_S), suppress(Unavailable):
            await self.pool.env.coordinator.release((lease_id,))
        if self.pool.host_limiter is not None and fetch_s is not None:
            self.pool.host_limiter.record_duration(self.host, fetch_s)
        self.pool.wakeup.set()

    async def release(self) -> None:
        """Releases every part that the task still holds. The host lease comes last, because only
        its release is a call."""
        self._forbid_preemption()
        if self.pool.reservations is not None and self.reservation is not None:
            self.pool.reservations.close(self.reservation)
        if self._is_writing:
            self.pool.limiter.end_write()
        else:
            self.pool.limiter.release(self.pool.job.caller, self.pool.run_id, 1)
            self.pool.pass_on(self.lease_id)
        if self.call is not None:
            self.call.close()
        await self.release_host()

    def _forbid_preemption(self) -> None:
        if self._fetch is not None:
            self.pool.limiter.forbid_preemption(self._fetch)
            self._fetch = None


class RunEnding(Exception):
    """The run has ended or must stop: none of its tasks may start."""


@dataclass(frozen=True, slots=True)
class NoPermit:
    """No permit can be taken now. With a `reason` the poller reports it and backs off; without one
    it polls again after `retry_s`."""

    reason: WaitReason | None = None
    retry_s: float = 0.0


@dataclass(slots=True, eq=False, kw_only=True)
class PermitPool:
    """The permits of one poller: those that its tasks hold, and the leases between two tasks.

    `report_wait` publishes what the run waits for. `wakeup` is set whenever a lease becomes idle.
    """

    env: Context
    job: Job
    run_id: RunId
    limiter: FairLimiter
    storage: StorageBreaker
    calls: CallLimiter | None
    reservations: BudgetReservations | None
    host_limiter: HostLimiter | None
    price: Callable[[Mapping[str, str]], Price]
    report_wait: Callable[[WaitReason | None], None]
    wakeup: Wakeup = field(default_factory=Wakeup)
    inflight_count: int = 0
    # Every message of the run was received.
    is_whole: bool = False
    idle_leases: list[LeaseId] = field(default_factory=list)
    # When each lease was last renewed: the idle ones and those of running tasks.
    renewed_at: dict[LeaseId, float] = field(default_factory=dict)

    @property
    def is_finishing(self) -> bool:
        """Returns whether all pages of the run that this process can fetch have arrived."""
        return self.is_whole and not self.inflight_count

    @property
    def free_count(self) -> int:
        """How many tasks of the run may start by its cap, as far as this process knows."""
        return permits_to_request(
            free_slots=self.limiter.capacity,
            cap=self.job.max_inflight,
            inflight=self.inflight_count,
            batch_max=self.env.config.pace.receive_max,
        )

    @property
    def room_count(self) -> int:
        """How many tasks could start now, by every limit that this process knows."""
        rooms = [self.free_count, self.limiter.room_for(self.job.caller)]
        if self.calls is not None:
            rooms.append(self.calls.limiter_for(self.job).room_count)
        return min(rooms)

    @property
    def parallel_max(self) -> int:
        """How many tasks of the run can be in flight in this process at best."""
        if self.calls is None:
            return min(self.job.max_inflight, self.limiter.capacity)
        return min(self.job.max_inflight, self.calls.limiter_for(self.job).window.capacity)

    async def acquire(self, count_max: int) -> list[Permit] | NoPermit:
        """Takes up to `count_max` permits, with the parts that do not depend on the task. Raises
        RunEnding if none may be taken any more.

        Nothing is received before, because a received message that cannot run is hidden from
        other workers and must be bounced. The parts are taken in this order:

        1. The budget is read, not reserved: without money no other part is of use, and the price
           of a task is known only when its row has been read.
        2. Call permits, because a key often allows fewer calls than this process has slots. The
           poller may wait for them for long, so it must not hold slots or leases meanwhile.
        3. Slots, which are also waited for, but seldom for longer than a page takes.
        4. Leases. They are never waited for. They come last because they are calls to the
           coordinator, and while they are held no other process can use them.
        """
        count = await self._affordable_count(count_max)
        if count == 0:
            return NoPermit(WaitReason.BUDGET)
        calls = await self._acquire_calls(count)
        slots_count = 0
        permits: list[Permit] = []
        try:
            if not calls:
                return NoPermit()
            if not self.limiter.room_for(self.job.caller):
                self.report_wait(WaitReason.WORKERS_BUSY)
            slots_count = await self.limiter.acquire(
                self.job.caller,
                self.run_id,
                weight=self.job.priority,
                count_max=len(calls),
            )
            if not slots_count:  # The process is shutting down: leave the leases to others.
                await self.release_unused()
                return NoPermit(retry_s=math.inf)
            if self.storage.is_open:  # The breaker opened while the poller waited for slots.
                return NoPermit()
            leases = await self._acquire_leases(slots_count)
            permits = [Permit(self, lease_id, calls.pop()) for lease_id in leases]
            return permits or NoPermit(WaitReason.JOB_CAP)
        finally:
            self._return_parts(slots_count - len(permits), calls)

    def return_unused(self, permits: Sequence[Permit]) -> None:
        """Returns permits for which no message was received. Their leases stay idle for the next
        poll: releasing and acquiring them again would be two calls to the coordinator."""
        self.idle_leases += [permit.lease_id for permit in permits]
        self._return_parts(len(permits), [permit.call for permit in permits])

    def pass_on(self, lease_id: LeaseId) -> None:
        """Makes the lease of a task idle, for the next task."""
        self.inflight_count -= 1
        self.idle_leases.append(lease_id)
        self.wakeup.set()

    async def release_unused(self) -> None:
        """Releases what no task uses, so that other pollers can: idle leases, and the part of the
        reservation that no call in progress may spend."""
        await self.release_idle()
        await self.return_unspent()

    async def release_idle(self) -> None:
        leases, self.idle_leases = self.idle_leases, []
        await self._release(leases)

    async def return_unspent(self) -> None:
        if self.reservations is not None:
            await self.reservations.return_unused()

    async def release_all(self) -> None:
        """Releases the leases of the poller, also those of tasks: its tasks have ended."""
        await self._release(list(self.renewed_at))

    def _return_parts(self, slots_count: int, calls: Sequence[CallPermit | None]) -> None:
        # All slots in one call: the limiter divides what becomes free between all waiters.
        self.limiter.release(self.job.caller, self.run_id, slots_count)
        for call in calls:
            if call is not None:
                call.close()

    async def _affordable_count(self, count_max: int) -> int:
        """Returns how many plain calls the budget can pay for, up to `count_max`."""
        if self.reservations is None:
            return count_max
        # The parameters of the job alone: those of its tasks are not known yet.
        price = self.price(self.job.params).in_unit(self.reservations.unit)
        if price == 0:
            return count_max
        return min(count_max, await self.reservations.available() // price)

    async def _acquire_calls(self, count_max: int) -> list[CallPermit | None]:
        """Takes call permits, no more than there are slots for: a call permit that waits for a slot
        is lost to other callers. Where this process fetches pages itself, none is needed. Returns
        nothing if none was available within REPORT_S."""
        if self.calls is None:
            return [None] * count_max
        run_id = self.run_id
        count = min(count_max, max(1, self.limiter.room_for(self.job.caller)))
        calls = await self.calls.acquire(self.job, run_id, count_max=count)
        if calls:
            return [*calls]
        self.report_wait(self.calls.reason_for(self.job))
        await self.release_unused()
        with trio.move_on_after(REPORT_S):
            calls = await self.calls.wait(self.job, run_id, count_max=count)
            if not calls:
                await self.wakeup.wait(cooldown_s(1, self.env.random))
        return [*calls]

    async def _acquire_leases(self, count: int) -> list[LeaseId]:
        """Takes up to `count` leases: first the idle ones of finished tasks, then new ones. While
        the coordinator is down, idle leases are not reused: reuse would let this process keep more
        than its share of the cap."""
        if self.env.is_apart():
            await self.release_idle()
        await self._renew_idle_leases()
        if len(self.idle_leases) < count:
            leases = await self._acquire_new_leases(count - len(self.idle_leases))
            self.idle_leases += leases
            await self._require_live_run()
        leases, self.idle_leases = self.idle_leases[:count], self.idle_leases[count:]
        return leases

    async def _require_live_run(self) -> None:
        """Reads the run's row after new leases were acquired. Raises RunEnding if it must stop.

        A stop first changes the row and then counts the leases. So either this poller notices the
        stop, or the stop notices the leases. Where a stop waits for workers whose leases may be
        invisible (`unseen_s`), the read is not necessary.
        """
        if self.env.config.unseen_s or not self.idle_leases:
            return
        run = await self.env.store.read(RunKey(self.job.job_id, self.run_id))
        if run is None or run.status not in RUN_LIVE or run.stop_requested_at is not None:
            raise RunEnding

    async def _acquire_new_leases(self, count: int) -> list[LeaseId]:
        """Shielded: a cancelled call could leave leases that this poller does not know of, and they
        would take up the cap until they expire."""
        now = trio.current_time()
        with trio.move_on_after(ACQUIRE_TIMEOUT_S, shield=True):
            leases = await self.env.coordinator.acquire(
                self.job.job_id,
                self.run_id,
                count_max=count,
                cap=self.job.max_inflight,
                ttl_s=limits.LEASE_TTL_S,
            )
            self.renewed_at.update(dict.fromkeys(leases, now))
            return leases
        raise Unavailable("the coordinator took too long over an acquire")

    async def _renew_idle_leases(self) -> None:
        """Renews the leases that are too old to be reused, in one call. The heartbeater renews only
        the leases of running tasks."""
        now = trio.current_time()
        old = [lease_id for lease_id, at in self.renewed_at.items() if at < now - REUSE_S_MAX]
        if set(old).isdisjoint(self.idle_leases):
            return
        lost = await self.env.coordinator.renew(old, ttl_s=limits.LEASE_TTL_S)
        self.renewed_at.update({lease_id: now for lease_id in old if lease_id not in lost})
        # The heartbeater cancels tasks that still run under a lost lease.
        for lease_id in lost.intersection(self.idle_leases):
            self.idle_leases.remove(lease_id)
            del self.renewed_at[lease_id]

    async def _release(self, leases: Sequence[LeaseId]) -> None:
        """Releases leases. If this is cancelled, they are released again when the poller ends."""
        if leases:
            await self.env.coordinator.release(leases)
        for lease_id in leases:
            del self.renewed_at[lease_id]


@dataclass(slots=True, eq=False)
class CallReservation:
    """The amount that one call may spend, and the amount that it has spent. From the start of the
    call the full price counts as spent, because an interrupted call may have been billed, until the
    cost is known."""

    unit: Unit
    price: int
    spent: int = 0

    def start(self) -> None:
        self.spent = self.price

    def finish(self, outcome: Outcome) -> None:
        if outcome.cost_known:
            is_credits = self.unit is Unit.CREDITS
            self.spent = outcome.credits if is_credits else outcome.cost_micros


class BudgetReservations:
    """One poller's reservation of a budget: `promised` for calls in progress, `spent` by ended
    calls.

    The reservation in the store is never below the sum of the two. Only one task at a time may call
    `reserve` or `return_unused`. `close` may be called at any time.
    """

    def __init__(self, env: Context, run: Run, unit: Unit, metrics: Metrics) -> None:
        self.unit = unit
        self._env = env
        self._metrics = metrics
        self._share = BudgetReservation(run.job_id, run.run_id, holder=env.new_id(), taken=0, seq=0)
        self._is_sure = True
        self._promised = 0
        self._spent = 0

    async def available(self) -> int:
        """Reads how much more could be reserved now."""
        budget = await self._env.store.read(BudgetKey(self._share.job_id, self._share.run_id))
        return self._available(0 if budget is None else budget.left)

    async def reserve(self, prices: Sequence[int]) -> list[CallReservation | None]:
        """Reserves the prices of these calls. Returns None for each call that the budget cannot pay
        for."""
        paid = [True] * len(prices)
        for _ in range(_TRIES):
            need = sum(price for price, fits in zip(prices, paid, strict=True) if fits)
            if need == 0:
                break
            verdict = await self._resize(self._promised + self._spent + need)
            if isinstance(verdict, Applied):
                self._promised += need
                return [
                    CallReservation(self.unit, price) if fits else None
                    for price, fits in zip(prices, paid, strict=True)
                ]
            if isinstance(verdict, Missing):
                return [None] * len(prices)
            if isinstance(verdict.row, Budget):
                # The refusal carries the budget row: drop the calls that it cannot pay for and try
                # again.
                paid = reservation.affordable(prices, self._available(verdict.row.left))
        # Calls without a price need no reservation.
        return [CallReservation(self.unit, 0) if price == 0 else None for price in prices]

    def close(self, reservation: CallReservation) -> None:
        """Ends a call. The part that it did not spend can pay for other calls."""
        self._promised -= reservation.price
        self._spent += reservation.spent
        if reservation.spent > reservation.price:
            self._metrics.invariant_violations.labels("call_price").inc()
            log.error(
                "a gateway call cost more than its reservation",
                extra={
                    "run": self._share.run_id,
                    "price": reservation.price,
                    "cost": reservation.spent,
                },
            )

    async def return_unused(self) -> None:
        """Returns the part of the reservation that no call in progress may spend."""
        for _ in range(_TRIES):
            if isinstance(await self._resize(self._promised + self._spent), Applied | Missing):
                return

    def _available(self, left: int) -> int:
        return max(0, left + self._share.taken - self._promised - self._spent)

    async def _resize(self, taken: int) -> Verdict:
        """Changes the size of the reservation by one numbered change. The store may refuse it
        because of an earlier change of this poller whose outcome was unknown; then the returned row
        states the size."""
        share = self._share
        if taken == share.taken and self._is_sure:
            return Applied(())
        self._is_sure = False  # Until the store has answered.
        # Money that is already spent must be recorded even if the budget has nothing left.
        is_owed = taken <= self._promised + self._spent
        change = (reservation.force_resize if is_owed else reservation.resize)(share, taken=taken)
        verdict = await self._env.commit(change)
        self._is_sure = True
        if isinstance(verdict, Applied):
            self._share = BudgetReservation(
                share.job_id, share.run_id, share.holder, taken, share.seq + 1
            )
        elif not isinstance(verdict, Missing) and isinstance(verdict.row, BudgetReservation):
            self._share = verdict.row
        return verdict
