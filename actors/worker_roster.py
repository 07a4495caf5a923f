"""WorkerRoster: reports that this process is alive, and reads which others are
(docs/architecture.md, Ownership).

Owns:    the report of this process, and the Roster, which the other actors of this process read.
Hears:   nothing: it reports and reads every `period_s`.
Says:    nothing; the Roster wakes who waits for a change of it.
Crashes: only by bug. Without new reports the Roster says that this process owns everything.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass

import trio

from actors.limiters.fair_limiter import FairLimiter
from actors.runtime import bounded_cleanup
from conveyor import __version__
from conveyor.domain import limits, ownership
from conveyor.domain.ids import RunId
from conveyor.domain.ownership import LiveWorkers
from conveyor.domain.run.wait_reason import WorkerReport
from conveyor.ports.errors import Unavailable
from conveyor.usecases.context import Context
from conveyor.usecases.run import run_progress

log = logging.getLogger(__name__)

# How long the withdrawal at the end may take. Without it, the report ages out after PRESENCE_TTL_S.
CLEANUP_S = 1.0


# How many times as rarely as its owner other workers look for due work of one kind. They take part
# if the owner does not get through its work.
OTHERS_LOOKS = 6


class Roster:
    """What this process owns. It owns everything while it has no recent reports of others, and
    always if `is_shared` is False, where its engine has no price per call.

    `slots` is how many tasks of one caller this process runs at once.
    """

    def __init__(self, process_id: str, *, slots: int, is_shared: bool) -> None:
        self.is_shared = is_shared
        self._process_id = process_id
        self._slots = slots
        self._live: LiveWorkers | None = None
        self._updated = trio.Event()
        # The workers that the last call of `wait_changed` has seen.
        self._seen: frozenset[str] | None = None

    def owns_run(self, run_id: RunId, *, tasks: int, cap: int) -> bool:
        """Returns whether this process is one of those that poll the run."""
        if not self.is_shared:
            return True
        count = ownership.owners_wanted(tasks=tasks, cap=cap, slots=self._slots)
        return self.owns(run_id, count=count)

    def owns(self, subject: str, *, count: int = 1) -> bool:
        """Returns whether this process is one of the first `count` owners of the subject."""
        if not self.is_shared:
            return True
        now = trio.current_time()
        return ownership.is_owner(self._process_id, subject, self._live, count=count, now=now)

    @classmethod
    def of_one(cls) -> Roster:
        """The roster of a process that shares no work."""
        return cls("", slots=1, is_shared=False)

    @property
    def is_unknown(self) -> bool:
        """Returns whether this process shares work and does not know with whom."""
        return self.is_shared and self._workers() is None

    async def wait_turn(self, subject: str, period_s: float) -> None:
        """Waits until this process looks for due work of one kind again: `period_s` if it is the
        owner, and longer otherwise."""
        for _ in range(OTHERS_LOOKS):
            await trio.sleep(period_s)
            if self.owns(subject):
                return

    def update(self, workers: frozenset[str]) -> None:
        self._live = LiveWorkers(workers, trio.current_time())
        self._updated.set()

    async def wait_changed(self, timeout_s: float) -> bool:
        """Waits until other workers are alive than at the last call, or the reports are too old.
        Returns False after `timeout_s`."""
        with trio.move_on_after(timeout_s):
            while self._seen == self._workers():
                self._updated = trio.Event()
                await self._updated.wait()
        is_changed = self._seen != self._workers()
        self._seen = self._workers()
        return is_changed

    def _workers(self) -> frozenset[str] | None:
        live = self._live
        return live.workers if live is not None and live.is_recent(trio.current_time()) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRoster:
    env: Context
    limiter: FairLimiter
    roster: Roster
    period_s: float = limits.PRESENCE_S

    def __post_init__(self) -> None:
        assert self.period_s * 3 < limits.PRESENCE_TTL_S  # Two reports may be missed.

    async def run(self) -> None:
        try:
            while True:
                try:
                    await self._report_and_read()
                except Unavailable as error:
                    log.warning("workers not read", extra={"cause": str(error)})
                await trio.sleep(self.period_s)
        finally:
            with bounded_cleanup(CLEANUP_S), suppress(Unavailable):
                await run_progress.withdraw_presence(self.env)

    async def _report_and_read(self) -> None:
        report = WorkerReport(
            self.limiter.slots_count,
            self.limiter.inflight_count,
            worker=self.env.process_id,
            release=__version__,
            usable=self.limiter.usable_count,
            draining=self.limiter.is_draining,
        )
        await run_progress.publish_presence(self.env, report)
        if self.roster.is_shared:
            reports = await run_progress.live_workers(self.env)
            # A worker that drains starts nothing more.
            self.roster.update(
                frozenset(seen.worker for seen in reports if seen.worker and not seen.draining)
            )
