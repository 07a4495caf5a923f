"""RunPoller: receives and runs the tasks of one run (SPEC.md 4.6).

One poll acquires what a task needs before it receives a message, so that no message is received
that cannot run. The order is from the scarcest to the cheapest to return:

1. budget: how many calls the run can still pay for (a read, no reservation yet);
2. call permits of the gateway's plan, where calls go to a remote gateway;
3. slots of this process, shared fairly between callers;
4. leases of the job, which cap its tasks in flight over all processes;
5. messages; then, for each message, a place at its host, the claim of its task, and the
   reservation of its price.

A permit that got no message is returned or kept for the next poll. The slot and the lease of a task
are released as soon as its page has arrived; everything else when the task has ended.

Owns:    the leases of the run in this process and the tasks that run under them, in a nursery of
         its own; the budget reservation of this process; the host leases of its tasks.
Hears:   RunUpdated.
Says:    nothing. It starts task runners.
Crashes: only by bug. Its leases expire and its messages become visible again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import trio

from actors.limiters.api_key_limiter import CallPermit
from actors.limiters.call_limiter import CallLimiter
from actors.limiters.fair_limiter import FairLimiter
from actors.limiters.storage_breaker import StorageBreaker
from actors.messages import PollerMessage, TaskAssignment
from actors.poller.budget import BudgetReservations
from actors.poller.host_limiter import AdmittedMessage, HostLimiter
from actors.poller.state import ClaimedMessage, PollerState, TaskPermit, bounce_unpermitted, receive
from actors.runtime import Inbox, bounded_cleanup
from actors.status_reporter import WaitStatus
from conveyor.domain import limits
from conveyor.domain.backpressure.budget import Price
from conveyor.domain.backpressure.permits import Backpressure, PermitOrder, idle_s
from conveyor.domain.changes import RunKey
from conveyor.domain.ids import LeaseId
from conveyor.domain.lifecycle import RUN_LIVE
from conveyor.domain.model import Job, PauseState, Run
from conveyor.domain.run.settlement import Claim, Claimed, Throttled
from conveyor.domain.run.wait_reason import WaitReason
from conveyor.ports.errors import QueueGone, Unavailable
from conveyor.ports.queue import Message
from conveyor.telemetry import Metrics
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import totals_of
from conveyor.usecases.run.runs import ensure_queue
from conveyor.usecases.run.tasks import claim, release_claim

log = logging.getLogger(__name__)

RECEIVE_ENOUGH = 10
RECEIVE_TIMEOUT_S = 10.0
LINGER_S, BREATH_S = 0.003, 0.5
LINGER_S_MIN, LINGER_S_MAX = 0.1, 1.0
CLEANUP_S = 3.0
# After so many empty receives the poller checks whether an open run has work left at all. If not,
# it polls only every ASLEEP_S until a list is added: a thousand idle open jobs must cost nothing.
EMPTY_RECEIVES_UNTIL_ASLEEP = 8
ASLEEP_S = 60.0
RETRY_PAUSE_S = 1.0
# How often a poller with fetches in progress reads the row of its run, in case the signal of a
# stop, a deletion or a pause was lost. A stop has 12 s to end every fetch in every process. This
# period, one read and the clean-up of cancelled work (POLLER_GRACE_S) fit into that.
WATCH_S = 3.0
# A poller that waits for a call permit reports its wait reason again after this time.
NOTE_S = 5.0

RunTask = Callable[[TaskAssignment], Awaitable[float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPoller:
    env: Context
    job: Job
    run_at_start: Run
    limiter: FairLimiter
    run_task: RunTask
    price: Callable[[Mapping[str, str]], Price]
    metrics: Metrics
    storage: StorageBreaker
    wait_status: WaitStatus = field(default_factory=WaitStatus)
    calls: CallLimiter | None = None

    async def run(self, inbox: Inbox[PollerMessage]) -> None:
        """Polls until the run has ended and every task that this poller started is done."""
        state = self._new_state()
        self._note_wait(state, None)
        try:
            async with inbox, trio.open_nursery() as nursery:
                nursery.start_soon(self._listen, inbox, state)
                nursery.start_soon(self._watch_run, state, nursery.cancel_scope)
                if state.host_limiter is not None:
                    nursery.start_soon(state.host_limiter.held.extend_forever)
                async with trio.open_nursery() as tasks:
                    await self._poll(state, tasks)
                nursery.cancel_scope.cancel()
        finally:
            self.wait_status.forget(self.run_at_start.run_id)
            with bounded_cleanup(CLEANUP_S):
                if self.calls is not None:
                    with suppress(Unavailable):  # This process counts them in any case.
                        await self.calls.keep_abandoned(self.job, state.run.run_id)
                with suppress(Unavailable):  # The messages become visible again by themselves.
                    await self._return_held(state)
                with suppress(Unavailable):  # A reservation that is not returned counts as spent.
                    await self._return_unspent(state)
                with suppress(Unavailable):  # The leases expire.
                    await self._release(state, list(state.renewed_at))

    def _new_state(self) -> PollerState:
        run, host_limits = self.run_at_start, self.job.host_limits
        state = PollerState(run)
        if run.budget is not None:
            state.reservations = BudgetReservations(self.env, run, run.budget.unit, self.metrics)
        if host_limits is not None:
            state.host_limiter = HostLimiter(self.env, self.job, host_limits, self.metrics)
        return state

    async def _listen(self, inbox: Inbox[PollerMessage], state: PollerState) -> None:
        async for message in inbox:
            if not message.is_signalled and message.run == state.run:
                continue  # From a scan of all runs: an unchanged row must not wake the poller.
            state.run = message.run
            state.refusals = state.empty_receives = 0
            state.changed.set()

    async def _watch_run(self, state: PollerState, work: trio.CancelScope) -> None:
        """Cancels the work of this poller when the row says that the run has ended or must stop.

        An idle poller need not read the row: it has nothing to cancel, and its next receive finds
        that the queue is gone.
        """
        key = RunKey(self.job.job_id, self.run_at_start.run_id)
        while True:
            await trio.sleep(WATCH_S)
            if not state.inflight_count:
                continue
            try:
                run = await self.env.store.read(key)
            except Unavailable as error:
                log.debug("run row not read", extra={"run": key.run_id, "cause": str(error)})
                continue
            if run is None or run.status not in RUN_LIVE or run.stop_requested_at is not None:
                log.info("run ended elsewhere", extra={"run": key.run_id})
                work.cancel()
            elif run.pause_state is not state.run.pause_state:
                state.run = run
                state.changed.set()

    async def _poll(self, state: PollerState, tasks: trio.Nursery) -> None:
        while True:
            try:
                wait_s = await self._next_poll(state, tasks)
            except Unavailable as error:
                log.warning(
                    "poll deferred: engine unavailable",
                    extra={"run": state.run.run_id, "cause": str(error)},
                )
                wait_s = RETRY_PAUSE_S
            if wait_s is None:
                return
            if wait_s:
                await state.wait_changed(wait_s)

    async def _next_poll(self, state: PollerState, tasks: trio.Nursery) -> float | None:
        """Polls once. Returns the seconds until the next poll; None when the run has ended."""
        try:
            await self._wait_for_room(state)
            return await self._poll_once(state, tasks)
        except QueueGone:
            return None if await self._run_has_ended() else RETRY_PAUSE_S

    async def _wait_for_room(self, state: PollerState) -> None:
        """Waits while the run is paused, at its cap, or held up by an outage."""
        while (reason := self._block_reason(state)) is not None:
            if reason is WaitReason.JOB_CAP:
                self._note_wait(state, reason)
                await state.wait_changed(math.inf)
                continue
            if reason is WaitReason.PAUSED:
                await self._return_held(state)
            await self._release(state, state.pop_idle_leases(len(state.idle_leases)))
            if reason is WaitReason.PAUSED:
                self._note_wait(state, reason)
                await state.wait_changed(math.inf)
            elif self.storage.is_open:
                self._note_wait(state, reason, self.storage.detail)
                await self.storage.wait_recovered(self.env.blobs, self.env.process_id)
            else:
                self._note_wait(state, reason, state.deferred_detail)
                await state.wait_changed(state.deferred_until - trio.current_time())

    def _block_reason(self, state: PollerState) -> WaitReason | None:
        """Returns the reason why no task of the run may be received now; None if one may."""
        if state.run.pause_state is PauseState.PAUSED:
            return WaitReason.PAUSED
        if self.storage.is_open:
            return WaitReason.STORAGE
        if trio.current_time() < state.deferred_until:
            return state.deferred_for
        return None if self._wanted(state) else WaitReason.JOB_CAP

    def _note_wait(
        self, state: PollerState, reason: WaitReason | None, detail: str | None = None
    ) -> None:
        """Publishes what this run waits for in this process; None when it waits for nothing."""
        state.wait_reason = reason
        self.wait_status.set_reason(state.run.run_id, reason, at=self.env.now(), detail=detail)

    @property
    def _backpressure(self) -> Backpressure:
        return self.env.policy.backpressure

    def _wanted(self, state: PollerState) -> int:
        return self._backpressure.wanted(
            free_slots=self.limiter.capacity,
            cap=self.job.max_inflight,
            held=state.inflight_count,
            batch_max=self.env.policy.pace.receive_max,
        )

    async def _poll_once(self, state: PollerState, tasks: trio.Nursery) -> float:
        """Acquires call permits, slots, leases and messages, in this order, and starts the tasks.
        Returns the seconds to wait before the next poll."""
        count_max = await self._affordable_count(state, state.receive_limit(self._wanted(state)))
        if count_max == 0:
            return await self._wait_for(state, WaitReason.BUDGET)
        permits = await self._call_permits(state, count_max)
        try:
            if not permits:
                return 0.0
            return await self._poll_with_permits(state, tasks, permits)
        finally:
            for permit in permits:
                if permit is not None:
                    permit.close()

    async def _call_permits(self, state: PollerState, count_max: int) -> list[CallPermit | None]:
        """Permits for calls to a remote gateway; where pages are fetched by this process itself,
        none is needed. No more than there are slots for: a permit that waits is of use to no one.
        Without any, it has waited here already."""
        if self.calls is None:
            return [None] * count_max
        run_id, count = (
            state.run.run_id,
            min(count_max, max(1, self.limiter.room_for(self.job.caller))),
        )
        permits = await self.calls.acquire(self.job, run_id, count_max=count)
        if permits:
            return [*permits]
        self._note_wait(state, self.calls.reason_for(self.job))
        await self._release_unused(state)
        with trio.move_on_after(NOTE_S):
            permits = await self.calls.wait(self.job, run_id, count_max=count)
            if not permits:
                await state.wait_changed(self._backpressure.cooldown_s(1, self.env.random))
        return [*permits]

    async def _poll_with_permits(
        self, state: PollerState, tasks: trio.Nursery, permits: list[CallPermit | None]
    ) -> float:
        """Polls for as many messages as there are call permits. Each permit that a task uses is
        removed from `permits`; the caller closes the rest."""
        count_max = len(permits)
        if not self.limiter.room_for(self.job.caller):
            self._note_wait(state, WaitReason.WORKERS_BUSY)
        slots = await self.limiter.acquire(
            self.job.caller, state.run.run_id, weight=self.job.priority, count_max=count_max
        )
        if not slots:  # The process is shutting down: leave the leases to other processes.
            await self._release_unused(state)
            return math.inf
        used = 0
        try:
            if self.storage.is_open:  # The breaker opened while the poller waited for slots.
                return 0.0
            leases: list[LeaseId] = []
            if self._backpressure.permits is PermitOrder.BEFORE_RECEIVE:
                leases = await self._leases(state, slots)
                if not leases:
                    return await self._wait_for(state, WaitReason.JOB_CAP)
            received = await self._receive_and_claim(state, leases, len(leases) or slots)
            used = len(received)
        finally:
            self.limiter.release(self.job.caller, state.run.run_id, slots - used)
        self._start_tasks(state, tasks, leases, received, permits)
        if received:
            state.refusals = 0
        if state.pop_refused():
            return await self._wait_for(state, WaitReason.JOB_CAP)
        if received:
            if all(taken.is_funded for taken in received):
                self._note_wait(state, None)
            await self._wait_for_batch(state, received)
            return 0.0
        await self._release_unused(state)
        # Messages of other hosts may be queued behind those of full hosts: poll again soon.
        is_full = state.wait_reason is WaitReason.HOST_CAP and not state.empty_receives
        state.refusals = 1 if is_full else state.refusals + 1
        self._note_wait(state, self._idle_reason(state))
        # Not after every empty receive, because reading the counters costs read units on AWS.
        if state.refusals % EMPTY_RECEIVES_UNTIL_ASLEEP == 0 and await self._is_drained(state):
            self.wait_status.forget(state.run.run_id)
            state.refusals -= 1
            return ASLEEP_S
        return min(idle_s(state.refusals), self._seconds_until_redelivery(state))

    async def _is_drained(self, state: PollerState) -> bool:
        """Returns whether every task of the open run has ended, so that only a new list can bring
        work. A new list changes the row of the run, which discovery reports to this poller."""
        if state.inflight_count or self._seconds_until_redelivery(state) < math.inf:
            return False
        run = await self.env.store.read(RunKey(self.job.job_id, state.run.run_id))
        if run is None or run.open_batches:
            return False
        totals = await totals_of(self.env, run)
        return totals.admitted == totals.done == run.planned

    async def _wait_for_batch(self, state: PollerState, received: Sequence[ClaimedMessage]) -> None:
        """Waits a moment for more free permits, so that one receive fetches several messages."""
        is_breathless = any(isinstance(taken.claim, Throttled) for taken in received)
        await trio.sleep(BREATH_S if is_breathless else LINGER_S)
        share = self.env.policy.pace.receive_share
        if share:
            at_once = min(self.job.max_inflight, self._callable_max())
            enough = min(RECEIVE_ENOUGH, -(-at_once // 4))
            with trio.move_on_after(min(max(share * state.task_s, LINGER_S_MIN), LINGER_S_MAX)):
                while self._room_count(state) < enough:
                    await state.wait_changed(math.inf)

    def _room_count(self, state: PollerState) -> int:
        """Returns how many tasks could start now."""
        rooms = [self._wanted(state), self.limiter.room_for(self.job.caller)]
        if self.calls is not None:
            rooms.append(self.calls.line_of(self.job).room_count)
        return min(rooms)

    def _callable_max(self) -> int:
        """Returns how many calls the gateway accepts at once, or the slots where there is none."""
        if self.calls is None:
            return self.limiter.capacity
        return self.calls.line_of(self.job).window.capacity

    def _idle_reason(self, state: PollerState) -> WaitReason | None:
        if self.calls is not None and not self.calls.is_open(self.job):
            return self.calls.reason_for(self.job)
        if state.wait_reason is WaitReason.HOST_CAP:
            return WaitReason.HOST_CAP
        if state.host_limiter is not None and state.host_limiter.until_due() < math.inf:
            return WaitReason.HOST_CAP
        return (
            self.wait_status.backoff_of(state.run.run_id)
            if state.next_redelivery_at < math.inf
            else None
        )

    async def _affordable_count(self, state: PollerState, wanted: int) -> int:
        """Returns how many plain calls the budget can pay for, up to `wanted`. Reserves nothing."""
        if state.reservations is None:
            return wanted
        price = self._price_of(state.reservations, {})
        return wanted if price == 0 else min(wanted, await state.reservations.available() // price)

    def _price_of(self, reservations: BudgetReservations, params: Mapping[str, str]) -> int:
        return self.price({**self.job.params, **params}).in_unit(reservations.unit)

    async def _wait_for(self, state: PollerState, reason: WaitReason) -> float:
        """Reports the wait reason and releases unused permits for other pollers to use."""
        self._note_wait(state, reason)
        await self._release_unused(state)
        state.refusals += 1
        return self._backpressure.cooldown_s(state.refusals, self.env.random)

    async def _release_unused(self, state: PollerState) -> None:
        await self._release(state, state.pop_idle_leases(len(state.idle_leases)))
        await self._return_unspent(state)

    async def _return_held(self, state: PollerState) -> None:
        if state.host_limiter is not None:
            await state.host_limiter.held.release_all()

    async def _return_unspent(self, state: PollerState) -> None:
        if state.reservations is not None:
            await state.reservations.return_unused()

    async def _leases(self, state: PollerState, count: int) -> list[LeaseId]:
        """Returns up to `count` leases: first the idle ones of finished tasks, then new ones. While
        the coordinator is down, idle leases are not reused: reuse would let this process keep more
        than its share of the cap."""
        if self.env.is_apart():
            await self._release(state, state.pop_idle_leases(len(state.idle_leases)))
        await state.renew_idle_leases(self.env.coordinator)
        leases = state.pop_idle_leases(count)
        if len(leases) < count:
            leases += await self._acquire(state, count - len(leases))
        return leases

    async def _acquire(self, state: PollerState, count: int) -> list[LeaseId]:
        """Acquires new leases. Shielded: a cancelled call could leave leases that this poller does
        not know of, and they would take up the cap until they expire."""
        now = trio.current_time()
        with trio.move_on_after(RECEIVE_TIMEOUT_S, shield=True):
            fresh = await self.env.coordinator.acquire(
                self.job.job_id,
                state.run.run_id,
                count_max=count,
                cap=self.job.max_inflight,
                ttl_s=limits.LEASE_TTL_S,
            )
            state.renewed_at.update(dict.fromkeys(fresh, now))
            return fresh
        raise Unavailable("the coordinator took too long over an acquire")

    async def _receive_and_claim(
        self, state: PollerState, leases: list[LeaseId], count_max: int
    ) -> list[ClaimedMessage]:
        """Receives messages and claims their tasks. Shielded: messages of a cancelled receive would
        stay invisible until their visibility timeout."""
        parked = [] if state.host_limiter is None else state.host_limiter.pop_held(count_max)
        try:
            with trio.move_on_after(RECEIVE_TIMEOUT_S, shield=True):
                fresh = await receive(self.env, self.metrics, state, count_max - len(parked))
                if self._backpressure.permits is not PermitOrder.BEFORE_RECEIVE:
                    leases += await self._leases(state, len(parked) + len(fresh))
                    rest = [*(message for message, _ in parked), *fresh][len(leases) :]
                    await bounce_unpermitted(self.env, self.metrics, state, rest)
                    fresh = fresh[: max(0, len(leases) - len(parked))]
                    parked = parked[: len(leases)]
                return await self._claim(state, parked, fresh)
            raise Unavailable("the engine took too long over a receive")
        except (QueueGone, Unavailable):
            await self._release(state, leases)
            raise

    async def _claim(
        self, state: PollerState, parked: Sequence[tuple[Message, str]], fresh: Sequence[Message]
    ) -> list[ClaimedMessage]:
        visits = [AdmittedMessage(message) for message in fresh]
        if state.host_limiter is not None:
            visits = await state.host_limiter.acquire_hosts(parked, fresh)
            if not visits and (parked or fresh):
                self._note_wait(state, WaitReason.HOST_CAP)
        if not visits:
            return []
        claims = await claim(self.env, [admitted.message.ref for admitted in visits])
        return await self._reserve_budget(state, visits, claims)

    async def _reserve_budget(
        self, state: PollerState, visits: Sequence[AdmittedMessage], claims: Sequence[Claim]
    ) -> list[ClaimedMessage]:
        """Reserves the price of each claimed task in the budget row, before any call starts. A task
        without a reservation is returned to the queue."""
        if state.reservations is None:
            return [ClaimedMessage(*each) for each in zip(visits, claims, strict=True)]
        prices = [self._price_for(state.reservations, each) for each in claims]
        tolls = await state.reservations.reserve(prices)
        if None in tolls:
            self._note_wait(state, WaitReason.BUDGET)
        return [
            ClaimedMessage(*each, is_funded=each[2] is not None)
            for each in zip(visits, claims, tolls, strict=True)
        ]

    def _price_for(self, reservations: BudgetReservations, claimed: Claim) -> int:
        """Returns the price of a task; 0 if the claim failed and this process will not fetch it."""
        if not isinstance(claimed, Claimed):
            return 0
        return self._price_of(reservations, claimed.task.params or {})

    async def _return_unfunded(self, work: TaskAssignment) -> float:
        """Returns a task that the budget cannot pay for. No attempt is counted."""
        assert isinstance(work.claim, Claimed)
        delay_s = self._backpressure.bounce_delay_s(work.message.receives)
        self.metrics.messages_bounced.inc()
        await release_claim(self.env, work.message.ref, work.claim.task)
        with suppress(Unavailable):  # The message becomes visible again by itself.
            await self.env.queue.bounce((work.message,), delay_s=delay_s)
        return delay_s

    def _start_tasks(
        self,
        state: PollerState,
        tasks: trio.Nursery,
        leases: Sequence[LeaseId],
        received: Sequence[ClaimedMessage],
        permits: list[CallPermit | None],
    ) -> None:
        state.idle_leases += leases[len(received) :]
        state.inflight_count += len(received)
        for lease_id, taken in zip(leases, received, strict=False):
            task_permit = TaskPermit(state, self.limiter, self.job.caller, lease_id)
            admitted = taken.admitted
            work = TaskAssignment(
                self.job,
                state.run,
                admitted.message,
                lease_id,
                taken.claim,
                task_permit.release_early,
                state.defer,
                taken.reservation,
                admitted.lease_id,
                permits.pop(),
            )
            tasks.start_soon(self._run_to_end, state, work, taken, task_permit)

    async def _run_to_end(
        self,
        state: PollerState,
        work: TaskAssignment,
        taken: ClaimedMessage,
        task_permit: TaskPermit,
    ) -> None:
        started_at = trio.current_time()
        delay_s: float | None = 0.0
        try:
            with trio.CancelScope() as scope:
                if self._is_free_of_charge(taken.claim):
                    task_permit.allow_preemption(scope, receives=work.message.receives)
                delay_s = await (
                    self.run_task(work) if taken.is_funded else self._return_unfunded(work)
                )
            if scope.cancelled_caught:
                self.metrics.fetches_preempted.inc()
            if delay_s is None:
                self.wait_status.count_finished(work.run.run_id)
                state.deferrals = 0
            else:
                state.next_redelivery_at = min(
                    state.next_redelivery_at, trio.current_time() + delay_s
                )
                state.changed.set()
        finally:
            state.task_s = trio.current_time() - started_at
            if state.reservations is not None and work.reservation is not None:
                state.reservations.close(work.reservation)
            if (
                state.host_limiter is not None
                and taken.is_funded
                and isinstance(taken.claim, Claimed)
            ):
                state.host_limiter.record_duration(taken.admitted, trio.current_time() - started_at)
            task_permit.release()
            if work.permit is not None:
                work.permit.close()
            await self._release_host(taken.admitted)
            if self._backpressure.permits is not PermitOrder.BEFORE_RECEIVE:
                with bounded_cleanup(CLEANUP_S), suppress(Unavailable):
                    await self._release(state, state.pop_idle_leases(len(state.idle_leases)))

    def _is_free_of_charge(self, claimed: Claim) -> bool:
        """Returns whether the fetch may be preempted and repeated: never one that costs money."""
        if not isinstance(claimed, Claimed):
            return False
        price = self.price({**self.job.params, **(claimed.task.params or {})})
        return not price.credits and not price.cost_micros

    async def _release_host(self, admitted: AdmittedMessage) -> None:
        """Releases the host lease of a task. If the release fails, the lease expires."""
        if admitted.lease_id is None:
            return
        with bounded_cleanup(CLEANUP_S), suppress(Unavailable):
            await self.env.coordinator.release((admitted.lease_id,))

    def _seconds_until_redelivery(self, state: PollerState) -> float:
        """Returns the seconds until a returned or held message is due: the next poll is then."""
        now = trio.current_time()
        if state.next_redelivery_at <= now:
            state.next_redelivery_at = math.inf
        parked_s = math.inf if state.host_limiter is None else state.host_limiter.until_due()
        return max(min(state.next_redelivery_at - now, parked_s), 0.01)

    async def _run_has_ended(self) -> bool:
        """Returns whether the run has ended, according to its row. A missing queue alone proves
        nothing: the queue of a live run is created again."""
        run = await self.env.store.read(RunKey(self.job.job_id, self.run_at_start.run_id))
        if run is not None and run.status in RUN_LIVE:
            return not await ensure_queue(self.env, run.job_id, run.run_id)
        return True

    async def _release(self, state: PollerState, leases: Sequence[LeaseId]) -> None:
        """Releases leases. If this is cancelled, they are released again when the poller ends."""
        if leases:
            await self.env.coordinator.release(leases)
        for lease_id in leases:
            del state.renewed_at[lease_id]
