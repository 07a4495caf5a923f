"""RunPoller: drains the queue of one run, taking permits before it receives (SPEC.md 4.6).

Owns:    the run's leases and the tasks that run under them, in a nursery of its own; its share of
         the run's budget, and its places at hosts that take few at a time.
Hears:   RunUpdated.
Says:    nothing: it starts task runners, and gives back what it did not use.
Crashes: only by bug. Its leases age out and its messages return.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import trio

from actors.board import WaitBoard
from actors.call_limiter import CallLimiter
from actors.call_line import CallPermit
from actors.doorkeeper import Doorkeeper, Visit
from actors.gate import FairGate
from actors.intake import receive, refuse
from actors.messages import PollerMessage, Work
from actors.purse import Purse
from actors.run_desk import Desk, Seat, Taken
from actors.runtime import Inbox, bounded_cleanup
from actors.storage_breaker import StorageBreaker
from conveyor.domain import limits
from conveyor.domain.backpressure import Lines, Permits, idle_s
from conveyor.domain.budget import Price
from conveyor.domain.changes import RunKey
from conveyor.domain.ids import LeaseId
from conveyor.domain.lifecycle import RUN_LIVE
from conveyor.domain.model import Job, PauseState, Run
from conveyor.domain.settlement import Claim, Claimed, NotTaken
from conveyor.domain.waiting import WaitReason
from conveyor.ports.errors import QueueGone, Unavailable
from conveyor.ports.queue import Message
from conveyor.telemetry import Metrics
from conveyor.usecases.env import Env
from conveyor.usecases.lookups import totals_of
from conveyor.usecases.runs import reopen_queue
from conveyor.usecases.tasks import claim, hand_back

log = logging.getLogger(__name__)

RECEIVE_ENOUGH = 10
TAKE_S = 10.0
LINGER_S, BREATH_S = 0.003, 0.5
LINGER_S_MIN, LINGER_S_MAX = 0.1, 1.0
CLEANUP_S = 3.0
# An open run whose tasks have all ended costs next to nothing: after a few seconds its queue is
# looked into only this often, unless a list is added.
MISSES_UNTIL_ASLEEP = 8
ASLEEP_S = 60.0
OUTAGE_S = 1.0
# How soon a poller with fetches under way learns from the run's row that it is stopped, deleted or
# paused, where no signal reached it. A stop has 12 s to end every fetch: this, the reading of one
# row, and the clean-up of cancelled work (POLLER_GRACE_S) fit in.
WATCH_S = 3.0
# A poller that waits for a permit says anew, after so long, what it waits for.
NOTE_S = 5.0

RunTask = Callable[[Work], Awaitable[float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPoller:
    env: Env
    job: Job
    run_at_start: Run
    gate: FairGate
    run_task: RunTask
    price: Callable[[Mapping[str, str]], Price]
    metrics: Metrics
    storage: StorageBreaker
    board: WaitBoard = field(default_factory=WaitBoard)
    calls: CallLimiter | None = None

    async def run(self, inbox: Inbox[PollerMessage]) -> None:
        """Returns when the run has ended and all that it started here is done."""
        desk = self._new_desk()
        self._note_wait(desk, None)
        try:
            async with inbox, trio.open_nursery() as nursery:
                nursery.start_soon(self._listen, inbox, desk)
                nursery.start_soon(self._watch_run, desk, nursery.cancel_scope)
                if desk.doors is not None:
                    nursery.start_soon(desk.doors.lot.keep_forever)
                async with trio.open_nursery() as tasks:
                    await self._poll(desk, tasks)
                nursery.cancel_scope.cancel()
        finally:
            self.board.forget(self.run_at_start.run_id)
            with bounded_cleanup(CLEANUP_S):
                if self.calls is not None:
                    with suppress(Unavailable):  # They count here all the same.
                        await self.calls.keep_abandoned(self.job, desk.run.run_id)
                with suppress(Unavailable):  # It comes back by itself.
                    await self._empty_lot(desk)
                with suppress(Unavailable):  # What is not given back counts as spent.
                    await self._settle_purse(desk)
                with suppress(Unavailable):  # Leases age out.
                    await self._release(desk, list(desk.fresh_at))

    def _new_desk(self) -> Desk:
        run, host_limits = self.run_at_start, self.job.host_limits
        desk = Desk(run)
        if run.budget is not None:
            desk.purse = Purse(self.env, run, run.budget.unit, self.metrics)
        if host_limits is not None:
            desk.doors = Doorkeeper(self.env, self.job, host_limits, self.metrics)
        return desk

    async def _listen(self, inbox: Inbox[PollerMessage], desk: Desk) -> None:
        async for message in inbox:
            if not message.is_signalled and message.run == desk.run:
                continue  # A scan of all runs must not wake those that have nothing to do.
            desk.run = message.run
            desk.misses = desk.dry_looks = 0
            desk.news.set()

    async def _watch_run(self, desk: Desk, work: trio.CancelScope) -> None:
        """Cancels the work of this poller once the run's row says that it is over or to be ended.

        An idle poller reads nothing: it fetches nothing either, and finds its queue gone.
        """
        key = RunKey(self.job.job_id, self.run_at_start.run_id)
        while True:
            await trio.sleep(WATCH_S)
            if not desk.inflight_count:
                continue
            try:
                run = await self.env.store.read(key)
            except Unavailable as error:
                log.debug("run not read", extra={"run": key.run_id, "cause": str(error)})
                continue
            if run is None or run.status not in RUN_LIVE or run.stop_requested_at is not None:
                log.info("run ended elsewhere", extra={"run": key.run_id})
                work.cancel()
            elif run.pause_state is not desk.run.pause_state:
                desk.run = run
                desk.news.set()

    async def _poll(self, desk: Desk, tasks: trio.Nursery) -> None:
        while True:
            try:
                wait_s = await self._next_round(desk, tasks)
            except Unavailable as error:
                log.warning("poll put off", extra={"run": desk.run.run_id, "cause": str(error)})
                wait_s = OUTAGE_S
            if wait_s is None:
                return
            if wait_s:
                await desk.wait_news(wait_s)

    async def _next_round(self, desk: Desk, tasks: trio.Nursery) -> float | None:
        """How long to wait before the next one; None when there will be none."""
        try:
            await self._wait_for_room(desk)
            return await self._round(desk, tasks)
        except QueueGone:
            return None if await self._is_over() else OUTAGE_S

    async def _wait_for_room(self, desk: Desk) -> None:
        """While paused, at the job's cap, or during an outage there is nothing to ask for."""
        while (reason := self._why_not(desk)) is not None:
            if reason is WaitReason.JOB_CAP:
                self._note_wait(desk, reason)
                await desk.wait_news(math.inf)
                continue
            if reason is WaitReason.PAUSED:
                await self._empty_lot(desk)
            await self._release(desk, desk.take_spare(len(desk.spare)))
            if reason is WaitReason.PAUSED:
                self._note_wait(desk, reason)
                await desk.wait_news(math.inf)
            elif self.storage.is_open:
                self._note_wait(desk, reason, self.storage.detail)
                await self.storage.wait_recovered(self.env.blobs, self.env.owner)
            else:
                self._note_wait(desk, reason, desk.deferred_detail)
                await desk.wait_news(desk.deferred_until - trio.current_time())

    def _why_not(self, desk: Desk) -> WaitReason | None:
        """Why no task of the run may be received now."""
        if desk.run.pause_state is PauseState.PAUSED:
            return WaitReason.PAUSED
        if self.storage.is_open:
            return WaitReason.STORAGE
        if trio.current_time() < desk.deferred_until:
            return desk.deferred_for
        return None if self._wanted(desk) else WaitReason.JOB_CAP

    def _note_wait(self, desk: Desk, reason: WaitReason | None, detail: str | None = None) -> None:
        """What holds the run up here from now on; None when nothing does."""
        desk.waits_for = reason
        self.board.note(desk.run.run_id, reason, at=self.env.now(), detail=detail)

    @property
    def _lines(self) -> Lines:
        return self.env.policy.lines

    def _wanted(self, desk: Desk) -> int:
        return self._lines.wanted(
            free_slots=self.gate.capacity,
            cap=self.job.max_inflight,
            held=desk.inflight_count,
            batch_max=self.env.policy.pace.receive_max,
        )

    async def _round(self, desk: Desk, tasks: trio.Nursery) -> float:
        """Takes permits for calls, then slots, then leases, then messages; answers how long to
        leave the queue alone."""
        count_max = await self._affordable(desk, desk.ask_for(self._wanted(desk)))
        if count_max == 0:
            return await self._wait_for(desk, WaitReason.BUDGET)
        permits = await self._call_permits(desk, count_max)
        try:
            if not permits:
                return 0.0
            return await self._round_within(desk, tasks, permits)
        finally:
            for permit in permits:
                if permit is not None:
                    permit.close()

    async def _call_permits(self, desk: Desk, count_max: int) -> list[CallPermit | None]:
        """Permits for calls to a remote gateway; where pages are fetched by this process itself,
        none is needed. No more than there are slots for: a permit that waits is of use to no one.
        Without any, it has waited here already."""
        if self.calls is None:
            return [None] * count_max
        run_id, count = desk.run.run_id, min(count_max, max(1, self.gate.room_for(self.job.caller)))
        permits = await self.calls.take(self.job, run_id, count_max=count)
        if permits:
            return [*permits]
        self._note_wait(desk, self.calls.reason_for(self.job))
        await self._let_go(desk)
        with trio.move_on_after(NOTE_S):
            permits = await self.calls.wait(self.job, run_id, count_max=count)
            if not permits:
                await desk.wait_news(self._lines.cooldown_s(1, self.env.random))
        return [*permits]

    async def _round_within(
        self, desk: Desk, tasks: trio.Nursery, permits: list[CallPermit | None]
    ) -> float:
        """One round for as many messages as there are permits; those that are used are taken off
        the list."""
        count_max = len(permits)
        if not self.gate.room_for(self.job.caller):
            self._note_wait(desk, WaitReason.WORKERS_BUSY)
        slots = await self.gate.take(
            self.job.caller, desk.run.run_id, weight=self.job.priority, count_max=count_max
        )
        if not slots:  # The process ends, and what others could use is theirs.
            await self._let_go(desk)
            return math.inf
        used = 0
        try:
            if self.storage.is_open:  # It opened while the poller waited for slots.
                return 0.0
            leases: list[LeaseId] = []
            if self._lines.permits is Permits.BEFORE_RECEIVE:
                leases = await self._leases(desk, slots)
                if not leases:
                    return await self._wait_for(desk, WaitReason.JOB_CAP)
            in_hand = await self._take(desk, leases, len(leases) or slots)
            used = len(in_hand)
        finally:
            self.gate.give_back(self.job.caller, desk.run.run_id, slots - used)
        self._start(desk, tasks, leases, in_hand, permits)
        if in_hand:
            desk.misses = 0
        if desk.take_refusal():
            return await self._wait_for(desk, WaitReason.JOB_CAP)
        if in_hand:
            if all(taken.is_paid for taken in in_hand):
                self._note_wait(desk, None)
            await self._linger(desk, in_hand)
            return 0.0
        await self._let_go(desk)
        # Behind messages of full hosts there may be others: these are looked through quickly.
        is_full = desk.waits_for is WaitReason.HOST_CAP and not desk.dry_looks
        desk.misses = 1 if is_full else desk.misses + 1
        self._note_wait(desk, self._why_idle(desk))
        # Not at every miss: the counters of a run whose tasks others have in hand cost reads.
        if desk.misses % MISSES_UNTIL_ASLEEP == 0 and await self._is_drained(desk):
            self.board.forget(desk.run.run_id)
            desk.misses -= 1
            return ASLEEP_S
        return min(idle_s(desk.misses), self._until_back(desk))

    async def _is_drained(self, desk: Desk) -> bool:
        """Whether every task that the run has by now has ended: it is open, and waits for more.
        Each list that is added changes the run's row, and discovery reports that."""
        if desk.inflight_count or self._until_back(desk) < math.inf:
            return False
        run = await self.env.store.read(RunKey(self.job.job_id, desk.run.run_id))
        if run is None or run.open_batches:
            return False
        totals = await totals_of(self.env, run)
        return totals.admitted == totals.done == run.planned

    async def _linger(self, desk: Desk, in_hand: Sequence[Taken]) -> None:
        """Tasks end one by one; a short wait makes one receive of several."""
        is_breathless = any(isinstance(taken.claim, NotTaken) for taken in in_hand)
        await trio.sleep(BREATH_S if is_breathless else LINGER_S)
        share = self.env.policy.pace.receive_share
        if share:
            at_once = min(self.job.max_inflight, self._callable_max())
            enough = min(RECEIVE_ENOUGH, -(-at_once // 4))
            with trio.move_on_after(min(max(share * desk.task_s, LINGER_S_MIN), LINGER_S_MAX)):
                while self._room_count(desk) < enough:
                    await desk.wait_news(math.inf)

    def _room_count(self, desk: Desk) -> int:
        """How many tasks could start now."""
        rooms = [self._wanted(desk), self.gate.room_for(self.job.caller)]
        if self.calls is not None:
            rooms.append(self.calls.line_of(self.job).room_count)
        return min(rooms)

    def _callable_max(self) -> int:
        """How many calls a remote gateway takes at once, where there is one."""
        if self.calls is None:
            return self.gate.capacity
        return self.calls.line_of(self.job).window.capacity

    def _why_idle(self, desk: Desk) -> WaitReason | None:
        if self.calls is not None and not self.calls.is_open(self.job):
            return self.calls.reason_for(self.job)
        if desk.waits_for is WaitReason.HOST_CAP:
            return WaitReason.HOST_CAP
        if desk.doors is not None and desk.doors.until_due() < math.inf:
            return WaitReason.HOST_CAP
        return self.board.backoff_of(desk.run.run_id) if desk.back_at < math.inf else None

    async def _affordable(self, desk: Desk, wanted: int) -> int:
        """How many plain calls the budget could pay for, up to `wanted`: a look, no promise."""
        if desk.purse is None:
            return wanted
        price = self._price_of(desk.purse, {})
        return wanted if price == 0 else min(wanted, await desk.purse.room() // price)

    def _price_of(self, purse: Purse, params: Mapping[str, str]) -> int:
        return self.price({**self.job.params, **params}).in_unit(purse.unit)

    async def _wait_for(self, desk: Desk, reason: WaitReason) -> float:
        """Others may have what this poller cannot use now."""
        self._note_wait(desk, reason)
        await self._let_go(desk)
        desk.misses += 1
        return self._lines.cooldown_s(desk.misses, self.env.random)

    async def _let_go(self, desk: Desk) -> None:
        await self._release(desk, desk.take_spare(len(desk.spare)))
        await self._settle_purse(desk)

    async def _empty_lot(self, desk: Desk) -> None:
        if desk.doors is not None:
            await desk.doors.lot.empty()

    async def _settle_purse(self, desk: Desk) -> None:
        if desk.purse is not None:
            await desk.purse.settle()

    async def _leases(self, desk: Desk, count: int) -> list[LeaseId]:
        """Leases for `count` tasks: those that finished tasks left behind, then new ones. Apart
        from others all are new: who passed them on would keep more than its share."""
        if self.env.is_apart():
            await self._release(desk, desk.take_spare(len(desk.spare)))
        await desk.freshen(self.env.coordinator)
        leases = desk.take_spare(count)
        if len(leases) < count:
            leases += await self._acquire(desk, count - len(leases))
        return leases

    async def _acquire(self, desk: Desk, count: int) -> list[LeaseId]:
        """Shielded: leases that nobody heard of would keep their places until they age out."""
        now = trio.current_time()
        with trio.move_on_after(TAKE_S, shield=True):
            fresh = await self.env.coordinator.acquire(
                self.job.job_id,
                desk.run.run_id,
                count_max=count,
                cap=self.job.max_inflight,
                ttl_s=limits.LEASE_TTL_S,
            )
            desk.fresh_at.update(dict.fromkeys(fresh, now))
            return fresh
        raise Unavailable("the coordinator took too long over an acquire")

    async def _take(self, desk: Desk, leases: list[LeaseId], count_max: int) -> list[Taken]:
        """Receives and claims. Shielded: what is cut off half-way would stay hidden for a while."""
        parked = [] if desk.doors is None else desk.doors.take_parked(count_max)
        try:
            with trio.move_on_after(TAKE_S, shield=True):
                fresh = await receive(self.env, self.metrics, desk, count_max - len(parked))
                if self._lines.permits is not Permits.BEFORE_RECEIVE:
                    leases += await self._leases(desk, len(parked) + len(fresh))
                    rest = [*(message for message, _ in parked), *fresh][len(leases) :]
                    await refuse(self.env, self.metrics, desk, rest)
                    fresh = fresh[: max(0, len(leases) - len(parked))]
                    parked = parked[: len(leases)]
                return await self._claim(desk, parked, fresh)
            raise Unavailable("the engine took too long over a receive")
        except (QueueGone, Unavailable):
            await self._release(desk, leases)
            raise

    async def _claim(
        self, desk: Desk, parked: Sequence[tuple[Message, str]], fresh: Sequence[Message]
    ) -> list[Taken]:
        visits = [Visit(message) for message in fresh]
        if desk.doors is not None:
            visits = await desk.doors.admit(parked, fresh)
            if not visits and (parked or fresh):
                self._note_wait(desk, WaitReason.HOST_CAP)
        if not visits:
            return []
        claims = await claim(self.env, [visit.message.ref for visit in visits])
        return await self._pay(desk, visits, claims)

    async def _pay(
        self, desk: Desk, visits: Sequence[Visit], claims: Sequence[Claim]
    ) -> list[Taken]:
        """Before any call, and on the run's books: what is not paid for is handed back."""
        if desk.purse is None:
            return [Taken(*each) for each in zip(visits, claims, strict=True)]
        prices = [self._price_for(desk.purse, each) for each in claims]
        tolls = await desk.purse.pay(prices)
        if None in tolls:
            self._note_wait(desk, WaitReason.BUDGET)
        return [
            Taken(*each, is_paid=each[2] is not None)
            for each in zip(visits, claims, tolls, strict=True)
        ]

    def _price_for(self, purse: Purse, claimed: Claim) -> int:
        """A task that is not ours to fetch costs nothing."""
        if not isinstance(claimed, Claimed):
            return 0
        return self._price_of(purse, claimed.task.params or {})

    async def _send_back(self, work: Work) -> float:
        """Its call cannot be paid for now: nothing was tried, and nothing counts."""
        assert isinstance(work.claim, Claimed)
        delay_s = self._lines.bounce_delay_s(work.message.receives)
        self.metrics.messages_bounced.inc()
        await hand_back(self.env, work.message.ref, work.claim.task)
        with suppress(Unavailable):  # It comes back by itself.
            await self.env.queue.bounce((work.message,), delay_s=delay_s)
        return delay_s

    def _start(
        self,
        desk: Desk,
        tasks: trio.Nursery,
        leases: Sequence[LeaseId],
        in_hand: Sequence[Taken],
        permits: list[CallPermit | None],
    ) -> None:
        desk.spare += leases[len(in_hand) :]
        desk.inflight_count += len(in_hand)
        for lease_id, taken in zip(leases, in_hand, strict=False):
            seat = Seat(desk, self.gate, self.job.caller, lease_id)
            visit = taken.visit
            work = Work(
                self.job,
                desk.run,
                visit.message,
                lease_id,
                taken.claim,
                seat.make_room,
                desk.defer,
                taken.toll,
                visit.lease_id,
                permits.pop(),
            )
            tasks.start_soon(self._see_through, desk, work, taken, seat)

    async def _see_through(self, desk: Desk, work: Work, taken: Taken, seat: Seat) -> None:
        started_at = trio.current_time()
        delay_s: float | None = 0.0
        try:
            with trio.CancelScope() as scope:
                if self._is_free_of_charge(taken.claim):
                    seat.allow_preemption(scope, receives=work.message.receives)
                delay_s = await (self.run_task(work) if taken.is_paid else self._send_back(work))
            if scope.cancelled_caught:
                self.metrics.fetches_preempted.inc()
            if delay_s is None:
                self.board.note_end(work.run.run_id)
                desk.deferrals = 0
            else:
                desk.back_at = min(desk.back_at, trio.current_time() + delay_s)
                desk.news.set()
        finally:
            desk.task_s = trio.current_time() - started_at
            if desk.purse is not None and work.toll is not None:
                desk.purse.take_back(work.toll)
            if desk.doors is not None and taken.is_paid and isinstance(taken.claim, Claimed):
                desk.doors.note_fetch(taken.visit, trio.current_time() - started_at)
            seat.leave()
            if work.permit is not None:
                work.permit.close()
            await self._leave(taken.visit)
            if self._lines.permits is not Permits.BEFORE_RECEIVE:
                with bounded_cleanup(CLEANUP_S), suppress(Unavailable):
                    await self._release(desk, desk.take_spare(len(desk.spare)))

    def _is_free_of_charge(self, claimed: Claim) -> bool:
        """Whether the fetch may be interrupted and made again: never one that is paid for."""
        if not isinstance(claimed, Claimed):
            return False
        price = self.price({**self.job.params, **(claimed.task.params or {})})
        return not price.credits and not price.cost_micros

    async def _leave(self, visit: Visit) -> None:
        """Makes room at a host; a place that could not be given up ages out."""
        if visit.lease_id is None:
            return
        with bounded_cleanup(CLEANUP_S), suppress(Unavailable):
            await self.env.coordinator.release((visit.lease_id,))

    def _until_back(self, desk: Desk) -> float:
        """Seconds until a message that went back is due; somebody should be there for it."""
        now = trio.current_time()
        if desk.back_at <= now:
            desk.back_at = math.inf
        parked_s = math.inf if desk.doors is None else desk.doors.until_due()
        return max(min(desk.back_at - now, parked_s), 0.01)

    async def _is_over(self) -> bool:
        """A queue that is gone proves nothing: the run's row does."""
        run = await self.env.store.read(RunKey(self.job.job_id, self.run_at_start.run_id))
        if run is not None and run.status in RUN_LIVE:
            return not await reopen_queue(self.env, run.job_id, run.run_id)
        return True

    async def _release(self, desk: Desk, leases: Sequence[LeaseId]) -> None:
        """Gives leases back; what is cut off here is given back again when the poller ends."""
        if leases:
            await self.env.coordinator.release(leases)
        for lease_id in leases:
            del desk.fresh_at[lease_id]
