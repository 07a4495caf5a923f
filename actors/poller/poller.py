"""RunPoller: receives and runs the tasks of one run (SPEC.md 4.6).

A poll takes permits, receives at most as many messages, claims their tasks, runs them, and releases
each permit when its task has ended (`_poll_once` and `_run_to_end`). What a permit consists of, and
in which order its parts are taken, is in actors/poller/permit.py.

Owns:    the permits of the run in this process and the tasks that run under them, in a nursery of
         its own; the messages that wait for their hosts.
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

from actors.limiters.call_limiter import CallLimiter
from actors.limiters.fair_limiter import FairLimiter
from actors.limiters.storage_breaker import StorageBreaker
from actors.messages import PollerMessage, TaskAssignment
from actors.poller.host_limiter import AdmittedMessage, HostLimiter
from actors.poller.permit import (
    BudgetReservations,
    NoPermit,
    Permit,
    PermitPool,
    RunEnding,
    Wakeup,
)
from actors.runtime import Inbox, bounded_cleanup
from actors.status_reporter import WaitStatus
from conveyor.domain import limits
from conveyor.domain.budget import Price, Unit
from conveyor.domain.changes import RunKey
from conveyor.domain.lifecycle import RUN_LIVE, accepts_settles
from conveyor.domain.model import Job, PauseState, Run
from conveyor.domain.run.settlement import Claim, Claimed, Throttled
from conveyor.domain.run.wait_reason import WaitReason
from conveyor.domain.timing import backoff_s, bounce_delay_s, cooldown_s, idle_s
from conveyor.ports.errors import QueueGone, Unavailable
from conveyor.ports.queue import Message
from conveyor.telemetry import Metrics
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import totals_of
from conveyor.usecases.run.runs import ensure_queue
from conveyor.usecases.run.tasks import claim, release_claim, take

log = logging.getLogger(__name__)

# Bounds the shielded receive and claim. A longer time delays the stop of a poller.
RECEIVE_TIMEOUT_S = 10.0
# SQS returns at most ten messages per call, so a larger batch saves no call.
RECEIVE_ENOUGH = 10
# Tasks that end together leave their permits within this time; one receive then serves them all.
GATHER_S = 0.003
# A store that throttled a claim gets this pause before the next claims.
THROTTLE_PAUSE_S = 0.5
# How long the poller waits for a batch of free permits, where receives cost money: a share of the
# time of a task, within these bounds. A longer wait saves receives and leaves permits unused.
BATCH_WAIT_S_MIN, BATCH_WAIT_S_MAX = 0.1, 1.0
# How long the clean-up of a poller may take. It is below POLLER_GRACE_S (5 s), after which the
# poller counts as overdue.
CLEANUP_S = 3.0
# After this many polls without a message, one message is requested: the queue is probably empty.
IDLE_POLLS_BEFORE_SINGLE = 2
# After so many of them the poller checks whether an open run has work left at all. If not, it polls
# only every ASLEEP_S until a list is added: a thousand idle open jobs must cost nothing.
IDLE_POLLS_BEFORE_ASLEEP = 8
ASLEEP_S = 60.0
# A poller that has every message of its run polls only so often, for messages that workers lost.
RECEIVED_ALL_S = 10.0
# Pause after a call to an engine has failed.
RETRY_PAUSE_S = 1.0
# How often a poller with fetches in progress reads the row of its run, in case the signal of a
# stop, a deletion or a pause was lost. A stop has 12 s to end every fetch in every process. This
# period, one read and the clean-up of cancelled work (POLLER_GRACE_S) fit into that.
WATCH_S = 3.0
# How long a run pauses after a cause that concerns all its tasks. Shorter pauses would claim and
# release tasks all the time; longer ones delay the restart after the cause has passed.
DEFER_S, DEFER_S_MAX = 0.5, 30.0

RunTask = Callable[[TaskAssignment], Awaitable[float | None]]


@dataclass(slots=True, eq=False)
class PollerState:
    """Mutable state of one poller. Only the poll loop and the tasks it started write it.

    `idle_polls` counts polls in a row that brought no message, `empty_receives` the receives among
    them. `next_redelivery_at` is when the first returned message is visible again.
    `started_count` counts the tasks that this poller has started, `first_receives` the messages
    that are delivered for the first time, `returned_count` those that it has returned. It does not
    poll before `quiet_until`, and starts no task while `is_owner` is False.
    """

    run: Run
    permits: PermitPool
    wakeup: Wakeup
    is_owner: bool = True
    next_redelivery_at: float = math.inf
    started_count: int = 0
    first_receives: int = 0
    returned_count: int = 0
    quiet_until: float = -math.inf
    idle_polls: int = 0
    empty_receives: int = 0
    emptied_at: float = -math.inf
    task_s: float = 0.0
    deferred_until: float = -math.inf
    deferred_for: WaitReason | None = None
    deferred_detail: str | None = None
    deferrals: int = 0

    @property
    def host_limiter(self) -> HostLimiter | None:
        return self.permits.host_limiter

    @property
    def receive_limit(self) -> int:
        """How many messages to ask for: one if the queue is probably still empty, because with
        DynamoDB leases every unused lease costs two writes."""
        count = self.permits.free_count
        return min(1, count) if self.idle_polls >= IDLE_POLLS_BEFORE_SINGLE else count

    def defer(self, reason: WaitReason, detail: str, delay_s: float | None) -> None:
        """Pauses the run for `delay_s`; without it, for a delay that doubles until a task ends.
        Tasks that were in progress together count as one deferral."""
        now = trio.current_time()
        if now >= self.deferred_until:
            self.deferrals += 1
        if delay_s is None:
            delay_s = backoff_s(self.deferrals - 1, first_s=DEFER_S, delay_s_max=DEFER_S_MAX)
        self.deferred_until = max(self.deferred_until, now + min(delay_s, DEFER_S_MAX))
        self.deferred_for, self.deferred_detail = reason, detail
        self.wakeup.set()


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
        """Polls until the run has ended or moved, and every task that it started is done."""
        state = self._new_state()
        self._report_wait(None)
        try:
            async with inbox, trio.open_nursery() as nursery:
                nursery.start_soon(self._apply_updates, inbox, state)
                nursery.start_soon(self._watch_run, state, nursery.cancel_scope)
                if state.host_limiter is not None:
                    nursery.start_soon(state.host_limiter.held.extend_forever)
                async with trio.open_nursery() as tasks:
                    await self._poll(state, tasks)
                nursery.cancel_scope.cancel()
        finally:
            self.wait_status.forget(self.run_at_start.run_id)
            with bounded_cleanup(CLEANUP_S):
                await self._clean_up(state)

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
                await state.wakeup.wait(wait_s)

    async def _next_poll(self, state: PollerState, tasks: trio.Nursery) -> float | None:
        """Polls when there is room. Returns the seconds until the next poll; None at the end."""
        try:
            await self._wait_for_room(state)
            if not state.is_owner:
                await self._hand_over(state)
                return math.inf if state.permits.inflight_count else None
            if state.quiet_until > -math.inf:
                return await self._stay_quiet(state)
            return await self._poll_once(state, tasks)
        except QueueGone:
            return None if await self._has_run_ended() else RETRY_PAUSE_S
        except RunEnding:
            return None

    async def _stay_quiet(self, state: PollerState) -> float | None:
        """Waits while no message can come, and then reads whether the run has ended."""
        if not state.permits.inflight_count:
            await state.permits.release_idle()
        quiet_s = state.quiet_until - trio.current_time()
        if quiet_s > 0 and not state.returned_count:
            return quiet_s
        state.quiet_until = -math.inf
        run = await self.env.store.read(RunKey(self.job.job_id, state.run.run_id))
        return None if run is None or run.status not in RUN_LIVE else 0.0

    async def _poll_once(self, state: PollerState, tasks: trio.Nursery) -> float:
        """Takes permits, receives as many messages, claims their tasks and starts them. Returns the
        seconds until the next poll."""
        permits = await state.permits.acquire(state.receive_limit)
        if isinstance(permits, NoPermit):
            if permits.reason is None:
                return permits.retry_s
            return await self._back_off(state, permits.reason)
        try:
            assignments = await self._receive_and_claim(state, permits)
        except (QueueGone, Unavailable):
            # This poller pauses now; meanwhile other processes can use the leases.
            await state.permits.release_idle()
            raise
        for work in assignments:
            tasks.start_soon(self._run_to_end, state, work)
        if not assignments:
            return await self._idle(state)
        state.idle_polls = 0
        if all(work.permit.is_funded for work in assignments):
            self._report_wait(None)
        await self._wait_for_batch(state, assignments)
        return 0.0

    async def _receive_and_claim(
        self, state: PollerState, permits: Sequence[Permit]
    ) -> list[TaskAssignment]:
        """Receives messages and claims their tasks. Returns permits without a message to the pool.
        Shielded: messages of a cancelled receive would stay invisible until their visibility
        timeout."""
        assignments: list[TaskAssignment] = []
        try:
            with trio.move_on_after(RECEIVE_TIMEOUT_S, shield=True):
                messages = await self._receive(state, len(permits))
                assignments = await self._claim(state, permits, messages)
                return assignments
            raise Unavailable("the engine took too long over a receive")
        finally:
            state.permits.inflight_count += len(assignments)
            state.started_count += len(assignments)
            state.permits.return_unused(permits[len(assignments) :])

    async def _run_to_end(self, state: PollerState, work: TaskAssignment) -> None:
        """Runs one task and releases its permit. The task runner fetches, stores and settles."""
        started_at = trio.current_time()
        delay_s: float | None = 0.0
        try:
            with trio.CancelScope() as scope:
                if self._is_free_of_charge(work.claim):
                    work.permit.allow_preemption(scope, receives=work.message.receives)
                delay_s = await (
                    self.run_task(work) if work.permit.is_funded else self._return_unfunded(work)
                )
            if scope.cancelled_caught:
                self.metrics.fetches_preempted.inc()
            if delay_s is None:
                self.wait_status.count_finished(work.run.run_id)
                state.deferrals = 0
            else:
                state.returned_count += 1
                redelivery_at = trio.current_time() + delay_s
                state.next_redelivery_at = min(state.next_redelivery_at, redelivery_at)
                state.wakeup.set()
        finally:
            state.task_s = trio.current_time() - started_at
            await work.permit.release()

    # Receiving and claiming: the steps of `_receive_and_claim`.

    async def _receive(self, state: PollerState, count_max: int) -> list[AdmittedMessage]:
        """Returns up to `count_max` messages that may be worked on. Held messages come first: they
        have waited for their hosts."""
        if state.host_limiter is None:
            new = await self._receive_new(state, count_max)
            return [AdmittedMessage(message) for message in new]
        held = state.host_limiter.pop_held(count_max)
        new = await self._receive_new(state, count_max - len(held))
        messages = await state.host_limiter.acquire_hosts(held, new)
        if not messages and (held or new):
            self._report_wait(WaitReason.HOST_CAP, state.host_limiter.describe_wait())
        return messages

    async def _receive_new(self, state: PollerState, count_max: int) -> list[Message]:
        """Receives up to `count_max` messages from the queue. While held messages keep the poller
        busy, an empty queue is not polled every time."""
        now = trio.current_time()
        is_early = state.host_limiter is not None and now < state.emptied_at + idle_s(
            state.empty_receives
        )
        if count_max == 0 or is_early:
            return []
        messages = await self.env.queue.receive(
            state.run.run_id, count_max=count_max, visibility_s=limits.VISIBILITY_S
        )
        self.metrics.receives.inc()
        self.metrics.messages_delivered.inc(len(messages))
        first = sum(message.receives == 1 for message in messages)
        state.first_receives += first
        state.returned_count = max(0, state.returned_count - (len(messages) - first))
        state.permits.is_whole = self._has_received_all(state)
        if messages:
            state.empty_receives, state.emptied_at = 0, -math.inf
        else:
            state.empty_receives, state.emptied_at = state.empty_receives + 1, now
        return messages

    async def _claim(
        self, state: PollerState, permits: Sequence[Permit], messages: Sequence[AdmittedMessage]
    ) -> list[TaskAssignment]:
        """Claims the tasks of the messages, and adds host lease and price to their permits."""
        if not messages:
            return []
        claims = await self._take(state, [admitted.message for admitted in messages])
        assignments = []
        for permit, admitted, result in zip(permits, messages, claims, strict=False):
            permit.host, permit.host_lease_id = admitted.host, admitted.lease_id
            assignments.append(
                TaskAssignment(self.job, state.run, admitted.message, result, permit, state.defer)
            )
        # After the claim, because the price depends on the task's own parameters; before any call
        # starts, because the budget must never be exceeded.
        await self._reserve_budget(state, assignments)
        return assignments

    async def _take(self, state: PollerState, messages: Sequence[Message]) -> list[Claim]:
        """Takes the tasks of the messages. Every task of a run with a budget is claimed by a write:
        if the queue delivers a message twice, a second fetch would be paid from the budget. So is
        every task of a run with host limits, whose messages are held for longer than they are
        hidden."""
        if state.permits.reservations is None and state.host_limiter is None:
            return await take(self.env, messages)
        return await claim(self.env, [message.ref for message in messages])

    async def _reserve_budget(
        self, state: PollerState, assignments: Sequence[TaskAssignment]
    ) -> None:
        """Reserves the price of each claimed task in the budget row. A task without a reservation
        is returned to the queue."""
        reservations = state.permits.reservations
        if reservations is None:
            return
        prices = [self._price_of(work.claim, reservations.unit) for work in assignments]
        for work, reservation in zip(assignments, await reservations.reserve(prices), strict=True):
            work.permit.reservation = reservation
            work.permit.is_funded = reservation is not None
        if not all(work.permit.is_funded for work in assignments):
            self._report_wait(WaitReason.BUDGET)

    def _price_of(self, claim_result: Claim, unit: Unit) -> int:
        """Returns the price of a task; 0 if it is not claimed or a duplicate, and not fetched."""
        if not isinstance(claim_result, Claimed) or claim_result.task.duplicate_of is not None:
            return 0
        return self._price(claim_result.task.params).in_unit(unit)

    def _price(self, task_params: Mapping[str, str] | None) -> Price:
        return self.price({**self.job.params, **(task_params or {})})

    def _is_free_of_charge(self, claim_result: Claim) -> bool:
        """Returns whether the fetch may be preempted and repeated: never one that costs money."""
        if not isinstance(claim_result, Claimed):
            return False
        price = self._price(claim_result.task.params)
        return not price.credits and not price.cost_micros

    async def _return_unfunded(self, work: TaskAssignment) -> float:
        """Returns a task that the budget cannot pay for. No attempt is counted."""
        assert isinstance(work.claim, Claimed)
        delay_s = bounce_delay_s(work.message.receives)
        self.metrics.messages_bounced.inc()
        await release_claim(self.env, work.message.ref, work.claim.task)
        with suppress(Unavailable):  # The message becomes visible again by itself.
            await self.env.queue.bounce((work.message,), delay_s=delay_s)
        return delay_s

    # Waiting: for room, for a batch of permits, and while the queue is empty.

    async def _wait_for_room(self, state: PollerState) -> None:
        """Waits while the run is paused, at its cap, or held up by an outage."""
        while state.is_owner and (reason := self._block_reason(state)) is not None:
            if reason is WaitReason.JOB_CAP:
                self._report_wait(reason)
                await state.wakeup.wait(math.inf)
                continue
            if reason is WaitReason.PAUSED and state.host_limiter is not None:
                await state.host_limiter.held.release_all()
            await state.permits.release_idle()
            if reason is WaitReason.PAUSED:
                self._report_wait(reason)
                await state.wakeup.wait(math.inf)
            elif self.storage.is_open:
                self._report_wait(reason, self.storage.detail)
                await self.storage.wait_recovered(self.env.blobs, self.env.process_id)
            else:
                self._report_wait(reason, state.deferred_detail)
                await state.wakeup.wait(state.deferred_until - trio.current_time())

    async def _hand_over(self, state: PollerState) -> None:
        """Gives back what other workers can use; tasks in flight go on here."""
        self._report_wait(None)
        if state.host_limiter is not None:
            await state.host_limiter.held.release_all()
        await state.permits.release_unused()

    def _block_reason(self, state: PollerState) -> WaitReason | None:
        """Returns the reason why no task of the run may be received now; None if one may."""
        if state.run.pause_state is PauseState.PAUSED:
            return WaitReason.PAUSED
        if self.storage.is_open:
            return WaitReason.STORAGE
        if trio.current_time() < state.deferred_until:
            return state.deferred_for
        return None if state.permits.free_count else WaitReason.JOB_CAP

    async def _back_off(self, state: PollerState, reason: WaitReason) -> float:
        """Reports why there is no permit, and releases what other pollers can use. Returns the
        seconds until the next poll."""
        self._report_wait(reason)
        await state.permits.release_unused()
        state.idle_polls += 1
        return cooldown_s(state.idle_polls, self.env.random)

    async def _wait_for_batch(
        self, state: PollerState, assignments: Sequence[TaskAssignment]
    ) -> None:
        """Waits a moment for more free permits, so that one receive fetches several messages."""
        is_throttled = any(isinstance(work.claim, Throttled) for work in assignments)
        await trio.sleep(THROTTLE_PAUSE_S if is_throttled else GATHER_S)
        share = self.env.config.pace.receive_share
        if share:
            # A quarter of all tasks: waiting for more would leave too many permits unused.
            enough = min(RECEIVE_ENOUGH, -(-state.permits.parallel_max // 4))
            wait_s = min(max(share * state.task_s, BATCH_WAIT_S_MIN), BATCH_WAIT_S_MAX)
            with trio.move_on_after(wait_s):
                while state.permits.room_count < enough:
                    await state.wakeup.wait(math.inf)

    async def _idle(self, state: PollerState) -> float:
        """Releases unused permits after an empty poll. Returns the seconds until the next poll."""
        await state.permits.release_unused()
        # Messages of other hosts may be queued behind those of full hosts: poll again soon.
        is_full = self._is_host_capped and not state.empty_receives
        state.idle_polls = 1 if is_full else state.idle_polls + 1
        reason = self._idle_reason(state)
        limiter = state.host_limiter if reason is WaitReason.HOST_CAP else None
        self._report_wait(reason, None if limiter is None else limiter.describe_wait())
        # Not after every empty receive, because reading the counters costs read units on AWS.
        if state.idle_polls % IDLE_POLLS_BEFORE_ASLEEP == 0 and await self._is_drained(state):
            self.wait_status.forget(state.run.run_id)
            # Checks again after the next poll.
            state.idle_polls -= 1
            return ASLEEP_S
        if self._has_received_all(state):
            state.quiet_until = trio.current_time() + RECEIVED_ALL_S
        return min(idle_s(state.idle_polls), self._seconds_until_redelivery(state))

    def _has_received_all(self, state: PollerState) -> bool:
        """Returns whether all messages of the run are here. Only where each receive is billed."""
        run = state.run
        can_grow = run.open_batches or not run.last_batch_received
        if can_grow or state.host_limiter is not None or not self.env.config.shares_runs:
            return False
        return state.first_receives >= run.total and not state.returned_count

    def _idle_reason(self, state: PollerState) -> WaitReason | None:
        if self.calls is not None and not self.calls.is_open(self.job):
            return self.calls.reason_for(self.job)
        if self._is_host_capped:
            return WaitReason.HOST_CAP
        if state.host_limiter is not None and state.host_limiter.until_due() < math.inf:
            return WaitReason.HOST_CAP
        if state.next_redelivery_at < math.inf:
            return self.wait_status.backoff_of(state.run.run_id)
        return None

    async def _is_drained(self, state: PollerState) -> bool:
        """Returns whether every task of the open run has ended, so that only a new list can bring
        work. A new list changes the row of the run, which discovery reports to this poller."""
        if state.permits.inflight_count or self._seconds_until_redelivery(state) < math.inf:
            return False
        run = await self.env.store.read(RunKey(self.job.job_id, state.run.run_id))
        if run is None or run.open_batches:
            return False
        totals = await totals_of(self.env, run)
        return totals.admitted == totals.done == run.planned

    def _seconds_until_redelivery(self, state: PollerState) -> float:
        """Returns the seconds until a returned or held message is due: the next poll is then."""
        now = trio.current_time()
        if state.next_redelivery_at <= now:
            state.next_redelivery_at = math.inf
        held_s = math.inf if state.host_limiter is None else state.host_limiter.until_due()
        return max(min(state.next_redelivery_at - now, held_s), 0.01)

    @property
    def _is_host_capped(self) -> bool:
        return self.wait_status.reason_of(self.run_at_start.run_id) is WaitReason.HOST_CAP

    def _report_wait(self, reason: WaitReason | None, detail: str | None = None) -> None:
        """Publishes what this run waits for in this process; None when it waits for nothing."""
        run_id = self.run_at_start.run_id
        self.wait_status.set_reason(run_id, reason, at=self.env.now(), detail=detail)

    # The life of the poller: its state, the row of its run, and its end.

    def _new_state(self) -> PollerState:
        run, host_limits, wakeup = self.run_at_start, self.job.host_limits, Wakeup()
        reservations = host_limiter = None
        if run.budget is not None:
            reservations = BudgetReservations(self.env, run, run.budget.unit, self.metrics)
        if host_limits is not None:
            host_limiter = HostLimiter(self.env, self.job, host_limits, self.metrics)
        permits = PermitPool(
            env=self.env,
            job=self.job,
            run_id=run.run_id,
            limiter=self.limiter,
            storage=self.storage,
            calls=self.calls,
            reservations=reservations,
            host_limiter=host_limiter,
            price=self.price,
            # It does not refer to the state, which refers to the permits: in a reference cycle, the
            # row of the job would stay in memory until the next collection of cycles.
            report_wait=self._report_wait,
            wakeup=wakeup,
        )
        return PollerState(run, permits, wakeup)

    async def _apply_updates(self, inbox: Inbox[PollerMessage], state: PollerState) -> None:
        async for message in inbox:
            is_known = message.run == state.run and message.is_owner == state.is_owner
            if is_known and not message.is_signalled:
                continue  # From a scan of all runs: an unchanged row must not wake the poller.
            state.run, state.is_owner = message.run, message.is_owner
            state.idle_polls = state.empty_receives = 0
            state.quiet_until = -math.inf
            state.wakeup.set()

    async def _watch_run(self, state: PollerState, work: trio.CancelScope) -> None:
        """Cancels the work of this poller when the row says that the run has ended or must stop.

        A poller that started nothing since the last read need not read again: it has nothing to
        cancel, and its next receive finds that the queue is gone.
        """
        key = RunKey(self.job.job_id, self.run_at_start.run_id)
        started_count = 0
        while True:
            await trio.sleep(WATCH_S)
            # Not the number in flight alone: short fetches may all have just ended.
            if not state.permits.inflight_count and state.started_count == started_count:
                continue
            started_count = state.started_count
            try:
                run = await self.env.store.read(key)
            except Unavailable as error:
                log.debug("run row not read", extra={"run": key.run_id, "cause": str(error)})
                continue
            if run is None or not accepts_settles(run):
                log.info("run ended elsewhere", extra={"run": key.run_id})
                work.cancel()
            elif run.pause_state is not state.run.pause_state:
                state.run = run
                state.wakeup.set()

    async def _has_run_ended(self) -> bool:
        """Returns whether the run has ended, according to its row. A missing queue alone proves
        nothing: the queue of a live run is created again."""
        run = await self.env.store.read(RunKey(self.job.job_id, self.run_at_start.run_id))
        if run is not None and run.status in RUN_LIVE:
            return not await ensure_queue(self.env, run.job_id, run.run_id)
        return True

    async def _clean_up(self, state: PollerState) -> None:
        """Returns everything that this poller holds. Each step is tried although another failed."""
        if self.calls is not None:
            with suppress(Unavailable):  # This process counts them in any case.
                await self.calls.keep_abandoned(self.job, state.run.run_id)
        if state.host_limiter is not None:
            with suppress(Unavailable):  # The messages become visible again by themselves.
                await state.host_limiter.held.release_all()
        with suppress(Unavailable):  # A reservation that is not returned counts as spent.
            await state.permits.return_unspent()
        with suppress(Unavailable):  # The leases expire.
            await state.permits.release_all()
