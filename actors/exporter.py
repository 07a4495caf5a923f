"""Exporter: makes requested export files, and removes them when they expire (SPEC.md 4.19).

Owns:    the exports in progress, a few at a time.
Hears:   nothing: the rows are the queue, which is queried every `period_s`.
Says:    nothing.
Crashes: only by bug. An interrupted export is due again and starts over.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import trio

from actors.worker_roster import Roster
from conveyor.domain.changes import JobKey
from conveyor.domain.export_record import Export
from conveyor.domain.ids import CallerId, ExportId, JobId
from conveyor.ports.errors import RowDamaged, Unavailable
from conveyor.telemetry import Metrics
from conveyor.usecases import export as exports
from conveyor.usecases.context import Context
from conveyor.usecases.crash_isolation import Crash, isolate

log = logging.getLogger(__name__)

# Due exports per query. With fewer, the exports of one caller could fill the page, and those of
# other callers would not be seen.
DUE_MAX = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporter:
    env: Context
    roster: Roster = field(default_factory=Roster.of_one)
    metrics: Metrics | None = None
    period_s: float = 0.5
    # More exports at once need more memory (a page and a group of bodies each) and compete with
    # scraping for the storage.
    at_once_max: int = 4

    async def run(self) -> None:
        under_way: dict[ExportId, CallerId] = {}
        if self.metrics is not None:
            self.metrics.exports.running.set_function(lambda: len(under_way))
        served_at: dict[CallerId, float] = {}
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    for export, caller in await self._choose_exports(under_way, served_at):
                        under_way[export.export_id] = caller
                        served_at[caller] = trio.current_time()
                        nursery.start_soon(self._run_export, export, under_way)
                except Unavailable as error:
                    log.warning("exports not read", extra={"cause": str(error)})
                if under_way:
                    await trio.sleep(self.period_s)
                else:
                    await self.roster.wait_turn("exports", self.period_s)

    async def _choose_exports(
        self, under_way: Mapping[ExportId, CallerId], served_at: dict[CallerId, float]
    ) -> list[tuple[Export, CallerId]]:
        """Chooses exports to start. At most half of all at once belong to one caller, and the
        caller that was served longest ago comes first, so that a caller with many large exports
        does not delay another."""
        room = self.at_once_max - len(under_way)
        if room <= 0:
            return []
        due: dict[CallerId, list[Export]] = {}
        owners: dict[JobId, CallerId] = {}
        for export in await exports.due(self.env, limit=DUE_MAX):
            if export.job_id not in owners:
                owners[export.job_id] = await self._owner_of(export.job_id)
            if export.export_id not in under_way:
                due.setdefault(owners[export.job_id], []).append(export)
        busy = Counter(under_way.values())
        # Forget callers without due or running exports, or the dict would grow without bound.
        for caller in [caller for caller in served_at if caller not in due and caller not in busy]:
            del served_at[caller]
        share = max(1, self.at_once_max // 2)
        waiting = sorted(due, key=lambda caller: served_at.get(caller, -math.inf))
        # One export of each caller per round: with the outer loop over `turn`, no caller's second
        # export comes before another caller's first.
        firsts = [
            (export, caller)
            for turn in range(share)
            for caller in waiting
            for export in due[caller][turn : turn + 1]
            if busy[caller] + turn < share
        ]
        return firsts[:room]

    async def _owner_of(self, job_id: JobId) -> CallerId:
        """Returns the caller of a job. Exports of a job that is deleted or has a damaged row share
        one caller."""
        try:
            job = await self.env.store.read(JobKey(job_id))
        except RowDamaged:
            job = None
        return CallerId("") if job is None else job.caller

    async def _run_export(self, export: Export, under_way: dict[ExportId, CallerId]) -> None:
        extra = {"run": export.run_id, "export": export.export_id}
        try:
            # An export that crashes the exporter is due again when its claim lapses, for a few
            # attempts.
            outcome = await isolate(
                partial(exports.process, self.env, export), "an export", extra=extra
            )
            if isinstance(outcome, Crash):
                return
            level = logging.WARNING if outcome is exports.Exported.FAILED else logging.INFO
            log.log(level, "export processed", extra={**extra, "outcome": outcome.value})
            if self.metrics is not None:
                self.metrics.exports.processed.labels(outcome.name.lower()).inc()
        except Unavailable as error:
            log.warning("export deferred: engine unavailable", extra={**extra, "cause": str(error)})
        finally:
            del under_way[export.export_id]
