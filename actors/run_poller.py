"""RunPoller: drains the queue of one run, taking permits before it receives (SPEC 6.7).

Owns:    the run's leases and the tasks that run under them, in a nursery of its own.
Hears:   RunUpdated.
Says:    nothing: it starts task runners, and gives back what it did not use.
Crashes: only by bug. Its leases age out and its messages return.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import trio

from actors.board import WaitBoard
from actors.gate import FairGate
from actors.messages import PollerMessage, Work
from actors.runtime import Inbox, bounded_cleanup
from conveyor.domain import limits
from conveyor.domain.backpressure import cooldown_s, idle_s, permits_wanted
from conveyor.domain.changes import RunKey
from conveyor.domain.ids import CallerId, LeaseId
from conveyor.domain.lifecycle import RUN_LIVE
from conveyor.domain.model import Job, PauseState, Run
from conveyor.domain.settlement import Claim
from conveyor.domain.waiting import WaitReason
from conveyor.ports.errors import QueueGone, Unavailable
from conveyor.ports.queue import Message
from conveyor.telemetry import Metrics
from conveyor.usecases.env import Env
from conveyor.usecases.tasks import claim

log = logging.getLogger(__name__)

RECEIVE_MAX = 50
TAKE_S = 10.0
LINGER_S = 0.003
CLEANUP_S = 3.0
OUTAGE_S = 1.0
# A lease that is passed on has one beat to spare: it lives through two from its last start.
REUSE_S_MAX = limits.LEASE_TTL_S - 2 * limits.BEAT_S - 1.0

RunTask = Callable[[Work], Awaitable[float | None]]


@dataclass(slots=True, eq=False)
class _Desk:
    """What the poller's loop shares with the tasks that it started."""

    run: Run
    spare: list[LeaseId] = field(default_factory=list)
    acquired_at: dict[LeaseId, float] = field(default_factory=dict)
    inflight_count: int = 0
    back_at: float = math.inf
    misses: int = 0
    news: trio.Event = field(default_factory=trio.Event)

    async def wait_news(self, timeout_s: float) -> None:
        with trio.move_on_after(timeout_s):
            await self.news.wait()
        self.news = trio.Event()

    def take_spare(self, count: int) -> list[LeaseId]:
        taken, self.spare = self.spare[:count], self.spare[count:]
        return taken

    def take_old(self, before: float) -> list[LeaseId]:
        """Spare leases too old to be passed on: the beat keeps only those in use alive."""
        old = [lease_id for lease_id in self.spare if self.acquired_at[lease_id] < before]
        self.spare = [lease_id for lease_id in self.spare if lease_id not in old]
        return old


@dataclass(slots=True, eq=False)
class _Seat:
    """The slot and the lease of one task, which the next one may have before it is all over."""

    desk: _Desk
    gate: FairGate
    caller: CallerId
    lease_id: LeaseId
    is_aside: bool = False

    def make_room(self) -> None:
        if self.gate.step_aside(self.caller, self.desk.run.run_id):
            self.is_aside = True
            self._pass_on_lease()

    def leave(self) -> None:
        if self.is_aside:
            self.gate.leave()
        else:
            self.gate.give_back(self.caller, self.desk.run.run_id, 1)
            self._pass_on_lease()

    def _pass_on_lease(self) -> None:
        self.desk.inflight_count -= 1
        self.desk.spare.append(self.lease_id)
        self.desk.news.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPoller:
    env: Env
    job: Job
    run_at_start: Run
    gate: FairGate
    run_task: RunTask
    metrics: Metrics
    board: WaitBoard = field(default_factory=WaitBoard)

    async def run(self, inbox: Inbox[PollerMessage]) -> None:
        """Returns when the run has ended and all that it started here is done."""
        desk = _Desk(self.run_at_start)
        self._note_wait(None)
        try:
            async with inbox, trio.open_nursery() as nursery:
                nursery.start_soon(self._listen, inbox, desk)
                async with trio.open_nursery() as tasks:
                    await self._poll(desk, tasks)
                nursery.cancel_scope.cancel()
        finally:
            self.board.forget(self.run_at_start.run_id)
            with bounded_cleanup(CLEANUP_S):
                await self._release(desk, list(desk.acquired_at))

    def _note_wait(self, reason: WaitReason | None) -> None:
        """What holds the run up here from now on; None when nothing does."""
        self.board.note(self.run_at_start.run_id, reason, at=self.env.now())

    async def _listen(self, inbox: Inbox[PollerMessage], desk: _Desk) -> None:
        async for message in inbox:
            desk.run = message.run
            desk.misses = 0
            desk.news.set()

    async def _poll(self, desk: _Desk, tasks: trio.Nursery) -> None:
        while True:
            try:
                await self._wait_for_room(desk)
                wait_s = await self._round(desk, tasks)
            except QueueGone:
                if await self._is_over():
                    return
                wait_s = OUTAGE_S
            except Unavailable as error:
                log.warning("poll put off", extra={"run": desk.run.run_id, "cause": str(error)})
                wait_s = OUTAGE_S
            if wait_s:
                await desk.wait_news(wait_s)

    async def _wait_for_room(self, desk: _Desk) -> None:
        """While paused or at the job's cap there is nothing to ask for."""
        while desk.run.pause_state is PauseState.PAUSED or not self._wanted(desk):
            is_paused = desk.run.pause_state is PauseState.PAUSED
            self._note_wait(WaitReason.PAUSED if is_paused else WaitReason.JOB_CAP)
            if is_paused:
                await self._release(desk, desk.take_spare(len(desk.spare)))
            await desk.wait_news(math.inf)

    def _wanted(self, desk: _Desk) -> int:
        return permits_wanted(
            free_slots=self.gate.capacity,
            cap=self.job.max_inflight,
            held=desk.inflight_count,
            batch_max=RECEIVE_MAX,
        )

    async def _round(self, desk: _Desk, tasks: trio.Nursery) -> float:
        """Takes slots, then leases, then messages; answers how long to leave the queue alone."""
        if self.gate.is_full:
            self._note_wait(WaitReason.WORKERS_BUSY)
        slots = await self.gate.take(
            self.job.caller,
            desk.run.run_id,
            weight=self.job.priority,
            count_max=self._wanted(desk),
        )
        used = 0
        try:
            leases = await self._leases(desk, slots)
            if not leases:
                desk.misses += 1
                self._note_wait(WaitReason.JOB_CAP)
                return cooldown_s(desk.misses, self.env.random)
            in_hand = await self._take(desk, leases)
            used = len(in_hand)
        finally:
            self.gate.give_back(self.job.caller, desk.run.run_id, slots - used)
        self._start(desk, tasks, leases, in_hand)
        if in_hand:
            desk.misses = 0
            self._note_wait(None)
            # Tasks end one by one; a short wait makes one receive of several.
            await trio.sleep(LINGER_S)
            return 0.0
        await self._release(desk, desk.take_spare(len(desk.spare)))
        desk.misses += 1
        is_backing_off = desk.back_at < math.inf
        self._note_wait(self.board.backoff_of(desk.run.run_id) if is_backing_off else None)
        return min(idle_s(desk.misses), self._until_back(desk))

    async def _leases(self, desk: _Desk, count: int) -> list[LeaseId]:
        """Leases for `count` tasks: those that finished tasks left behind, then new ones."""
        now = trio.current_time()
        await self._release(desk, desk.take_old(now - REUSE_S_MAX))
        leases = desk.take_spare(count)
        if len(leases) < count:
            leases += await self._acquire(desk, count - len(leases))
        return leases

    async def _acquire(self, desk: _Desk, count: int) -> list[LeaseId]:
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
            desk.acquired_at.update(dict.fromkeys(fresh, now))
            return fresh
        raise Unavailable("the coordinator took too long over an acquire")

    async def _take(self, desk: _Desk, leases: Sequence[LeaseId]) -> list[tuple[Message, Claim]]:
        """Receives and claims. Shielded: what is cut off half-way would stay hidden for a while."""
        try:
            with trio.move_on_after(TAKE_S, shield=True):
                messages = await self.env.queue.receive(
                    desk.run.run_id, count_max=len(leases), visibility_s=limits.VISIBILITY_S
                )
                self.metrics.receives.inc()
                self.metrics.messages_delivered.inc(len(messages))
                if not messages:
                    return []
                claims = await claim(self.env, [message.ref for message in messages])
                return list(zip(messages, claims, strict=True))
            raise Unavailable("the engine took too long over a receive")
        except (QueueGone, Unavailable):
            await self._release(desk, leases)
            raise

    def _start(
        self,
        desk: _Desk,
        tasks: trio.Nursery,
        leases: Sequence[LeaseId],
        in_hand: Sequence[tuple[Message, Claim]],
    ) -> None:
        desk.spare += leases[len(in_hand) :]
        desk.inflight_count += len(in_hand)
        for lease_id, (message, claimed) in zip(leases, in_hand, strict=False):
            seat = _Seat(desk, self.gate, self.job.caller, lease_id)
            work = Work(self.job, desk.run, message, lease_id, claimed, seat.make_room)
            tasks.start_soon(self._see_through, desk, work, seat)

    async def _see_through(self, desk: _Desk, work: Work, seat: _Seat) -> None:
        try:
            delay_s = await self.run_task(work)
            if delay_s is None:
                self.board.note_end(work.run.run_id)
            else:
                desk.back_at = min(desk.back_at, trio.current_time() + delay_s)
                desk.news.set()
        finally:
            seat.leave()

    def _until_back(self, desk: _Desk) -> float:
        """Seconds until a message that went back is due; somebody should be there for it."""
        now = trio.current_time()
        if desk.back_at <= now:
            desk.back_at = math.inf
        return max(desk.back_at - now, 0.01)

    async def _is_over(self) -> bool:
        """A queue that is gone proves nothing: the run's row does."""
        run = await self.env.store.read(RunKey(self.job.job_id, self.run_at_start.run_id))
        if run is not None and run.status in RUN_LIVE:
            await self.env.queue.open_run(run.run_id)
            return False
        return True

    async def _release(self, desk: _Desk, leases: Sequence[LeaseId]) -> None:
        """Gives leases back; what is cut off here is given back again when the poller ends."""
        if leases:
            await self.env.coordinator.release(leases)
        for lease_id in leases:
            del desk.acquired_at[lease_id]
