"""Audits: every row of a run recounted, and some of its bodies read again (docs/api.md, Audit)."""

from __future__ import annotations

import hashlib
from collections import Counter
from contextlib import aclosing

import msgspec
import trio

from conveyor.domain import limits
from conveyor.domain.changes import RunKey
from conveyor.domain.errors import NotFound
from conveyor.domain.lifecycle import RUN_LIVE, RUN_VISIBLE
from conveyor.domain.model import Result, Run, Task
from conveyor.domain.run import audit as audit_rules
from conveyor.domain.run.audit import BadBody, Difference
from conveyor.ports.errors import BlobMissing
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import pages_of, totals_of
from conveyor.usecases.run.retention import expiries_of


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """What was found; `is_live` when the run went on meanwhile, so that counts have some play."""

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
    """Reads every row once, a page at a time, and up to `AUDIT_BODIES_MAX` bodies as a whole."""
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
            # Twice the time that a page took belongs to others.
            await trio.sleep(2 * (trio.current_time() - begun_at))
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
    """A fair sample of the rows that have a body; `number` is how many there were so far."""
    if len(sample) < limits.AUDIT_BODIES_MAX:
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
