"""Finds jobs by what their rows do not order: the state of the latest run, and a part of the name
(docs/api.md, Listing jobs)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from conveyor.api.route import Parameter
from conveyor.api.schedule import cached_job_response
from conveyor.api.server.request import RequestContext
from conveyor.domain import limits
from conveyor.domain.changes import JobKey, RunKey
from conveyor.domain.errors import InvalidArgument
from conveyor.domain.ids import JobId, RunId
from conveyor.domain.lifecycle import RUN_LIVE, RUN_LIVE_STORED, RUN_VISIBLE
from conveyor.domain.model import Job, Run, RunStatus
from conveyor.domain.queries import JobsOf, RunsIn
from conveyor.schemas.responses import JobResponse
from conveyor.usecases.context import Context

# The statuses under which a live run is shown.
_SHOWN_LIVE = frozenset({RunStatus.RUNNING, RunStatus.PENDING})
# Live runs of all callers that are read for one list.
_LIVE_RUNS_MAX = 10_000
_PAGE = 500


class JobFilter(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions that are checked row by row. `name` is in lower case."""

    run_statuses: frozenset[RunStatus] | None = None
    name: str | None = None
    has_failures: bool = False

    @property
    def is_empty(self) -> bool:
        return self == JobFilter()

    @property
    def scope(self) -> str:
        """A text that is the same for equal filters, in every process."""
        return f"{sorted(self.run_statuses or ())}|{self.name}|{self.has_failures}"

    @property
    def is_live(self) -> bool:
        return self.run_statuses is not None and self.run_statuses <= _SHOWN_LIVE

    def matches_name(self, job: Job) -> bool:
        return self.name is None or self.name in (job.name or "").lower()

    def may_match(self, run: Run) -> bool:
        """Whether the run can have one of the statuses, from its row alone."""
        if self.run_statuses is None:
            return True
        return bool(self.run_statuses & (_SHOWN_LIVE if run.status in RUN_LIVE else {run.status}))

    def matches(self, job: JobResponse) -> bool:
        run = job.latest_run
        if run is None:
            return self.run_statuses is None and not self.has_failures
        is_wanted = self.run_statuses is None or run.status in self.run_statuses
        return is_wanted and not (self.has_failures and not run.stats.failed)


def filter_from(call: RequestContext) -> JobFilter:
    name = call.parameter("name")
    return JobFilter(
        run_statuses=_statuses_from(call.parameter("run_status")),
        name=None if name is None else name.lower(),
        has_failures=call.flag("with_failures"),
    )


def _statuses_from(text: str | None) -> frozenset[RunStatus] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not set(words) <= RUN_VISIBLE:
        statuses = ", ".join(sorted(RUN_VISIBLE))
        raise InvalidArgument(
            f"run_status must be a comma-separated list of {statuses}.", pointer="/run_status"
        )
    return frozenset(RunStatus(word) for word in words)


FILTERS = (
    Parameter("name", {"type": "string"}, "Only jobs whose name contains this text."),
    Parameter(
        "run_status",
        {"type": "string"},
        "Only jobs whose latest run has one of these statuses, separated by commas. The page may "
        "be short; only a missing `next_cursor` means that nothing is left.",
    ),
    Parameter(
        "with_failures",
        {"type": "boolean", "default": False},
        "Only jobs whose latest run has failed tasks.",
    ),
)


async def find_matching(
    env: Context, query: JobsOf, job_filter: JobFilter
) -> tuple[list[JobResponse], JobId | None]:
    """Returns up to `limit` jobs, and the id after which the next page starts; None at the end.

    A page may be short: it ends after JOBS_READ_MAX rows, however rare the matching jobs are.
    """
    if job_filter.is_live:
        return await _show(env, _live_jobs(env, query), query.limit, job_filter)
    responses: list[JobResponse] = []
    position = query.before
    for _ in range(limits.JOBS_READ_MAX // limits.LIST_ROWS_MAX):
        page = msgspec.structs.replace(query, before=position, limit=limits.LIST_ROWS_MAX)
        rows = await env.store.find(page)
        matching, until = await _show(env, _each(rows), query.limit - len(responses), job_filter)
        responses += matching
        if until is not None:
            return responses, until
        if len(rows) < limits.LIST_ROWS_MAX:
            return responses, None
        position = rows[-1].job_id
    return responses, position


async def _show(
    env: Context, jobs: AsyncGenerator[Job, None], count: int, job_filter: JobFilter
) -> tuple[list[JobResponse], JobId | None]:
    """The first `count` jobs that match, and the last of them if others may follow."""
    responses: list[JobResponse] = []
    async with aclosing(jobs):
        async for job in jobs:
            if not job_filter.matches_name(job) or not await _may_match(env, job, job_filter):
                continue
            response = await cached_job_response(env, job)
            if job_filter.matches(response):
                responses.append(response)
                if len(responses) == count:
                    return responses, job.job_id
    return responses, None


async def _may_match(env: Context, job: Job, job_filter: JobFilter) -> bool:
    if job_filter.run_statuses is None and not job_filter.has_failures:
        return True
    if job.latest_run_id is None:
        return False
    run = await env.store.read(RunKey(job.job_id, job.latest_run_id))
    return run is not None and job_filter.may_match(run)


async def _each(jobs: list[Job]) -> AsyncGenerator[Job, None]:
    for job in jobs:
        yield job


async def _live_jobs(env: Context, query: JobsOf) -> AsyncGenerator[Job, None]:
    """The caller's jobs with a live run, newest first. Engines find live runs by an index; a job is
    read only when it is asked for."""
    ids: set[JobId] = set()
    after: RunId | None = None
    for _ in range(_LIVE_RUNS_MAX // _PAGE):
        runs = await env.store.find(RunsIn(statuses=RUN_LIVE_STORED, after=after, limit=_PAGE))
        ids |= {run.job_id for run in runs if run.caller == query.caller}
        if len(runs) < _PAGE:
            break
        after = runs[-1].run_id
    if query.before is not None:
        ids = {job_id for job_id in ids if job_id < query.before}
    for job_id in sorted(ids, reverse=True):
        job = await env.store.read(JobKey(job_id))
        if job is not None and _is_asked_for(job, query):
            yield job


def _is_asked_for(job: Job, query: JobsOf) -> bool:
    return (
        job.status in query.statuses
        and query.type in {None, job.type}
        and query.external_id in {None, job.external_id}
    )
