"""Audit: recounts every row of a run and reads some of its bodies again (docs/api.md, Audit)."""

from __future__ import annotations

import hashlib
from collections import Counter
from contextlib import aclosing

import msgspec
import trio

from conveyor.domain.changes import RunKey
from conveyor.domain.errors import NotFound
from conveyor.domain.lifecycle import RUN_LIVE, RUN_VISIBLE
from conveyor.domain.model import Result, Run, Task
from conveyor.domain.run import audit as audit_rules
from conveyor.domain.run.audit import BadBody, Difference
from conveyor.ports.errors import BlobMissing
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import pages_of, totals_of
from conveyor.usecases.run.results import expiries_of


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an audit. `is_live` is True if the run was live at the end, so that the
    counters may have moved."""

    run: Run
    is_live: bool
    counts: dict[str, int]
    differences: list[Difference]
    bodies: int
    bad_bodies: list[BadBody]

    @property
    def is_ok(self) -> bool:
        return not self.differences and not self.bad_bodies


async def audit(env: Context, run: Run) -> Audit:
    """Reads every row once, page by page, and up to `audit_bodies_max` bodies completely."""
    before, expiries = await totals_of(env, run), await expiries_of(env, run)
    counts: Counter[str] = Counter()
    sample: list[Task] = []
    bodies = 0
    async with aclosing(pages_of(env, run)) as pages:
        async for page in pages:
            begun_at = trio.current_time()
            for row in page:
                audit_rules.count_row(counts, row)
                if row.result is not None and not expiries.is_over(row):
                    bodies += 1
                    _consider(env, sample, row, bodies)
            # An audit uses at most a third of the time, so that it does not delay other work.
            await trio.sleep(2 * (trio.current_time() - begun_at))
    # Counters before and after the walk: while a run is live, a row's count may lie between the
    # two.
    after = await totals_of(env, run)
    current = await env.store.read(RunKey(run.job_id, run.run_id))
    if current is None or current.status not in RUN_VISIBLE:
        raise NotFound("There is no such run.")
    problems = [(task, await _problem_of(env, task.result)) for task in sample if task.result]
    return Audit(
        run=current,
        is_live=current.status in RUN_LIVE,
        counts={name: counts[name] for name in audit_rules.recorded(after)},
        differences=audit_rules.compare(current, counts, before, after),
        bodies=len(problems),
        bad_bodies=[BadBody(task.task_id, problem) for task, problem in problems if problem],
    )


def _consider(env: Context, sample: list[Task], row: Task, number: int) -> None:
    """Reservoir sampling: each row with a body has the same chance to be in the sample. `number` is
    how many such rows were seen so far."""
    if len(sample) < env.config.audit_bodies_max:
        sample.append(row)
        return
    place = int(env.random.uniform(0, number))
    if place < len(sample):
        sample[place] = row


async def _problem_of(env: Context, result: Result) -> str | None:
    digest, size = hashlib.sha256(), 0
    try:
        async with aclosing(env.blobs.open(result.key)) as pieces:
            async for piece in pieces:
                digest.update(piece)
                size += len(piece)
    except BlobMissing:
        return "missing"
    is_whole = (size, digest.hexdigest()) == (result.size_bytes, result.sha256)
    return None if is_whole else "damaged"
