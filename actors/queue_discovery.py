"""QueueDiscovery: finds the live runs and keeps one poller for each
(docs/architecture.md, Discovery).

Only the runs that this process owns have a poller here (docs/architecture.md, Ownership). A poller
whose run moves to other workers ends when its last task has ended.

Owns:    the pollers: which runs have one, and the address of each.
Hears:   RunChanged, TearDown; it reads the Roster.
Says:    RunUpdated to pollers; a receipt to the sender of a TearDown.
Crashes: only by bug, and never because of a single run: a run that crashes discovery is deferred.
         A new incarnation stops the pollers that it finds and starts with a full scan.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

import trio

from actors.messages import DiscoveryMessage, PollerMessage, RunChanged, RunUpdated, TearDown
from actors.runtime import (
    Address,
    Child,
    DynamicSupervisor,
    Inbox,
    Mailbox,
    MailboxFull,
    NameTaken,
    NotSupervising,
    receive_batch,
)
from actors.worker_roster import Roster
from conveyor.domain.changes import JobKey, RunKey
from conveyor.domain.errors import Conflict
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.lifecycle import RUN_LIVE, RUN_LIVE_STORED, is_stopping
from conveyor.domain.model import Job, Run
from conveyor.domain.queries import RunsIn
from conveyor.ports.coordinator import TeardownResult
from conveyor.ports.errors import Unavailable
from conveyor.usecases.context import Context
from conveyor.usecases.crash_isolation import Crash, isolate
from conveyor.usecases.run import runs

log = logging.getLogger(__name__)

# Rows per query of a scan. Smaller pages cost more calls, larger ones more memory at once.
PAGE = 500
# The capacity of the mailbox (actors/tree.py): one batch may empty it, and repeated RunChanged
# messages of a run are merged within a batch.
MAIL_MAX = 1_000
# A delta scan reads rows from this long before the previous scan, because the clocks of the
# processes that write `updated_at` differ. Rows that are read twice change nothing.
OVERLAP_S = 60.0
# How long a stopping poller has to clean up. After that it counts as overdue, and the receipt of a
# teardown is not complete. Each clean-up of a poller and of a task runner is bounded by 3 s.
POLLER_GRACE_S = 5.0
# Without signals, a new run waits this long for its poller. Each scan is one query or more.
DELTA_S = 10.0
# How long the first scan waits for the reports of other workers. Without them, it would start
# pollers for all runs.
FIRST_ROSTER_S = 3.0
# How long a stopped run counts as held while its leases cannot be counted. The poller reads its
# run's row every WATCH_S (3 s) and has POLLER_GRACE_S to clean up; the rest is for a slow store.
UNCOUNTED_S = 12.0

# Longest delay before a run that crashes discovery is tried again. It is never dropped: a later
# release may handle it.
RETRY_S_MAX = 600.0

MakePoller = Callable[[Job, Run, Mailbox[PollerMessage]], Child]


@dataclass(frozen=True, slots=True)
class _CrashCount:
    """How often a run has crashed discovery in a row, and when it is tried again."""

    count: int
    retry_at: float

    def is_over(self, now: float) -> bool:
        """Returns whether no scan has found the run since its last retry was due, so the run has
        ended."""
        return now > self.retry_at + 2 * RETRY_S_MAX


@dataclass(slots=True)
class _State:
    """The state of one incarnation: the address of each poller, and the runs that crashed it.

    `caps` has the caps of runs that this process does not own because of their cap. `handed_over`
    has the runs whose pollers were told to end.
    """

    addresses: dict[RunId, Address[PollerMessage]] = field(default_factory=dict)
    crashes: dict[RunId, _CrashCount] = field(default_factory=dict)
    caps: dict[RunId, int] = field(default_factory=dict)
    handed_over: dict[RunId, JobId] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDiscovery:
    env: Context
    pollers: DynamicSupervisor
    make_poller: MakePoller
    roster: Roster
    delta_s: float = DELTA_S
    resync_s: float = 120.0

    async def run(self, inbox: Inbox[DiscoveryMessage]) -> None:
        state = _State()
        # Pollers of the previous incarnation have no known address, so they cannot receive
        # RunUpdated. Stop them before the first scan starts new ones.
        for name in self.pollers.names():
            await self.pollers.stop_child(name)
        async with inbox, trio.open_nursery() as nursery:
            nursery.start_soon(self._scan_forever, state)
            while True:
                batch = await receive_batch(inbox, MAIL_MAX)
                changed = {
                    (message.job_id, message.run_id)
                    for message in batch
                    if isinstance(message, RunChanged) and self._concerns_us(message)
                }
                # Each run in a task of its own: reading one row must not delay the signals of other
                # runs. Sorted, because the order of a set differs between processes and a
                # simulation must be repeatable.
                for job_id, run_id in sorted(changed):
                    nursery.start_soon(self._refresh_run, state, job_id, run_id)
                for message in batch:
                    match message:
                        case TearDown():
                            nursery.start_soon(self._tear_down, state, message)
                        case RunChanged():
                            pass
                        case _:
                            assert_never(message)

    async def _scan_forever(self, state: _State) -> None:
        """Scans all live runs at the start, every `resync_s`, and when a worker came or went; and
        the recently changed ones every `delta_s`."""
        since, resync_at = 0.0, 0.0
        if self.roster.is_unknown:
            await self.roster.wait_changed(FIRST_ROSTER_S)
        while True:
            self._forget_ended_runs(state)
            await self._check_handed_over(state)
            started_at = self.env.now()
            # If the wall clock was set back by more than the overlap, a delta scan would miss runs
            # that change now.
            is_full = trio.current_time() >= resync_at or started_at < since
            try:
                await self._scan(state, 0.0 if is_full else since)
                # Only after a complete scan. An interrupted scan is repeated from the same time.
                since = started_at - OVERLAP_S
                if is_full:
                    resync_at = trio.current_time() + self.resync_s
            except Unavailable as error:
                log.warning("scan deferred: engine unavailable", extra={"cause": str(error)})
            if await self.roster.wait_changed(self.delta_s):
                resync_at = 0.0

    def _concerns_us(self, message: RunChanged) -> bool:
        """Returns whether this process polls the run, or may have to. The cap of the run is not
        known yet, so a run with many tasks may turn out to need fewer workers."""
        return message.run_id in self.pollers.names() or self.roster.owns_run(
            message.run_id, tasks=message.tasks, cap=message.tasks
        )

    async def _check_handed_over(self, state: _State) -> None:
        """Reads the runs whose pollers were told to end, until they have: if this process owns such
        a run again meanwhile, no other worker may poll it."""
        for run_id, job_id in list(state.handed_over.items()):
            del state.handed_over[run_id]
            if not await self._refresh_run(state, job_id, run_id):
                state.handed_over[run_id] = job_id

    async def _scan(self, state: _State, since: float) -> None:
        after: RunId | None = None
        seen: set[RunId] = set()
        while True:
            query = RunsIn(statuses=RUN_LIVE_STORED, updated_since=since, after=after, limit=PAGE)
            page = await self.env.store.find(query)
            for run in page:
                seen.add(run.run_id)
                await self._isolate(state, run.run_id, partial(self._reconcile_run, state, run))
            if len(page) < PAGE:
                break
            after = page[-1].run_id
        if not since:  # All live runs: the others have ended.
            state.caps = {run_id: cap for run_id, cap in state.caps.items() if run_id in seen}

    def _forget_ended_runs(self, state: _State) -> None:
        """Drops the addresses of pollers that have ended: a poller ends by itself when its run
        ends."""
        for run_id in state.addresses.keys() - set(self.pollers.names()):
            del state.addresses[run_id]
        now = trio.current_time()
        for run_id in [run_id for run_id, crash in state.crashes.items() if crash.is_over(now)]:
            del state.crashes[run_id]

    async def _refresh_run(self, state: _State, job_id: JobId, run_id: RunId) -> bool:
        """Reads one run and ensures its poller. Returns False if the engine is unavailable."""
        try:
            read = partial(self._read_and_reconcile, state, job_id, run_id)
            await self._isolate(state, run_id, read)
        except Unavailable as error:
            log.warning(
                "run not refreshed: engine unavailable", extra={"run": run_id, "cause": str(error)}
            )
            return False
        return True

    async def _read_and_reconcile(self, state: _State, job_id: JobId, run_id: RunId) -> None:
        run = await self.env.store.read(RunKey(job_id, run_id))
        if run is not None and run.status in RUN_LIVE:
            await self._reconcile_run(state, run, is_signalled=True)
        else:
            await self._stop_poller(state, run_id)

    async def _isolate(
        self, state: _State, run_id: RunId, handle: Callable[[], Awaitable[None]]
    ) -> None:
        """Handles one run. A run that crashes discovery is tried again after a growing delay. Only
        its first crash is logged as an error."""
        crashes = state.crashes.get(run_id)
        if crashes is not None and trio.current_time() < crashes.retry_at:
            return
        extra = {"run": run_id}
        done = await isolate(handle, "a run", extra=extra, level=logging.DEBUG)
        if isinstance(done, Crash):
            # Read again: a scan and a signal may handle one run at the same time.
            crashes = state.crashes.get(run_id)
            if crashes is None:
                log.error("a run crashed discovery", extra=extra, exc_info=done.error)
            count = 1 if crashes is None else crashes.count + 1
            delay_s = min(self.delta_s * 2**count, RETRY_S_MAX)
            state.crashes[run_id] = _CrashCount(count, trio.current_time() + delay_s)
        else:
            state.crashes.pop(run_id, None)

    async def _reconcile_run(
        self,
        state: _State,
        run: Run,
        *,
        is_signalled: bool = False,
    ) -> None:
        """Ensures that a live run has a poller which knows the current row. For a run with a stop
        request, stops the poller and finishes the stop."""
        if is_stopping(run):
            is_concerned = run.run_id in self.pollers.names() or self.roster.owns(run.run_id)
            await self._stop_poller(state, run.run_id)
            # While another process still works on the run, that process holds leases. Its own
            # discovery reaches this line later, and the last one finishes the stop; if it had
            # found leases of others, the first owner does.
            if is_concerned and not await self._is_held(run):
                # A conflict means that other processes keep changing the row. The next scan tries
                # again.
                with suppress(Conflict):
                    await runs.finish_stop(self.env, run.job_id, run.run_id)
            return
        address = state.addresses.get(run.run_id)
        is_owner = self._owns(state, run)
        if address is not None and run.run_id in self.pollers.names():
            if not is_owner:
                state.handed_over[run.run_id] = run.job_id
            try:
                address.tell_nowait(RunUpdated(run, is_signalled, is_owner))
            except MailboxFull:
                # The poller has unread updates. The next scan sends it the current row.
                log.debug("poller mailbox full", extra={"run": run.run_id})
            return
        if is_owner:
            await self._start_poller(state, run)

    def _owns(self, state: _State, run: Run) -> bool:
        tasks = max(run.planned, run.total)
        return self.roster.owns_run(run.run_id, tasks=tasks, cap=state.caps.get(run.run_id, tasks))

    async def _start_poller(self, state: _State, run: Run) -> None:
        job = await self.env.store.read(JobKey(run.job_id))
        # Check again after the read: a concurrent refresh of the same run may have started the
        # poller.
        if job is None or run.run_id in self.pollers.names():
            return
        state.caps[run.run_id] = job.max_inflight
        if not self._owns(state, run):
            return
        # Each RunUpdated replaces the one before, so a poller gains nothing from a longer backlog.
        mailbox: Mailbox[PollerMessage] = Mailbox(capacity=4)
        try:
            await self.pollers.start_child(self.make_poller(job, run, mailbox))
            state.addresses[run.run_id] = mailbox.address
        # A concurrent start was faster, or the supervisor is stopping. Neither needs a second
        # poller.
        except (NameTaken, NotSupervising):
            return

    async def _stop_poller(self, state: _State, run_id: RunId) -> bool:
        state.addresses.pop(run_id, None)
        return await self.pollers.stop_child(run_id)

    async def _tear_down(self, state: _State, message: TearDown) -> None:
        # Count before the poller stops: stopping releases the leases.
        held = await self._count_leases(message.run_id)
        is_complete = await self._stop_poller(state, message.run_id)
        # A remote gateway continues a call after the connection closes. A direct fetch ends with
        # it.
        abandoned = held if self.env.config.targets is None else 0
        message.reply.send(TeardownResult(held, abandoned, complete=is_complete))

    async def _is_held(self, run: Run) -> bool:
        """Returns whether work on a stopping run still holds leases. If the leases cannot be
        counted, the run counts as held for UNCOUNTED_S, the time in which every worker notices the
        stop and ends its work."""
        assert run.stop_requested_at is not None
        try:
            return await self.env.coordinator.count(run.run_id) > 0
        except Unavailable:
            return 0 <= self.env.now() - run.stop_requested_at < UNCOUNTED_S

    async def _count_leases(self, run_id: RunId) -> int:
        """Counts the leases of the run. Returns 0 if the coordinator is unavailable: an outage must
        not prevent the teardown."""
        try:
            return await self.env.coordinator.count(run_id)
        except Unavailable as error:
            log.warning("leases not counted", extra={"run": run_id, "cause": str(error)})
            return 0
