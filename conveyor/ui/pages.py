"""The pages: each handler reads what one page shows (docs/dashboard.md, Pages)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, NamedTuple
from urllib.parse import urlencode

from conveyor.api.server.request import Download, Response
from conveyor.domain import limits
from conveyor.domain.errors import NotFound
from conveyor.domain.ids import CallerId
from conveyor.domain.lifecycle import RUN_LIVE, RUN_VISIBLE, SCHEDULE_FIRES
from conveyor.domain.model import JobType, Run
from conveyor.domain.queries import DueSchedules, RunsIn
from conveyor.domain.schedule import ScheduleStatus
from conveyor.domain.submit.target import host_of
from conveyor.schemas.responses import JobResponse, RunResponse, SeriesBucket
from conveyor.schemas.views import instant
from conveyor.ui.chart import Chart, make_chart, seconds_of
from conveyor.ui.client import LocalClient
from conveyor.ui.render import PREVIEW_HEADERS
from conveyor.ui.system import disk, engine_calls, tree_lines
from conveyor.ui.visit import Page, Redirect, Visit
from conveyor.usecases.run.run_progress import live_workers

# The start of a body that the preview shows. A browser lays out a longer page for seconds.
PREVIEW_BYTES_MAX = 512 * 1024
JOBS_SHOWN = 25
TASKS_SHOWN = 50
# Operators see the runs of all callers that changed within this time, so many of them.
_RECENT_S = 7 * 24 * 3600.0
_RECENT_RUNS_MAX = 2_000
# Operators see the schedules of all callers that trigger within ten years: all of them.
_SCHEDULES_AHEAD_S = 10 * 366 * 24 * 3600.0
_LIVE = "running,pending"
# The most hours that the chart of the overview shows.
CHART_HOURS = 3
# Runs that last less than this have at most one sample, which would not show in the chart.
_UNSAMPLED_S = 120.0
# Failed tasks that are read to count them by host, and the hosts that are shown.
_FAILED_READ_MAX = 500
_HOSTS_SHOWN = 6
# The order of the list costs the rows of all tasks, so that of a larger run has to be asked for.
_SMALL_RUN = 1_000
# Events that are read at a time, and how often, to find those of one run.
_EVENTS_READ = 500
_EVENT_PAGES_MAX = 10
# Events are numbered after they happened, and the clocks of processes differ.
_SKEW_S = 60.0
# Jobs of a caller whose stored pages are summed up for the System page.
_STORED_JOBS_READ = 50
_ULID = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}\Z")

JOB_FILTERS = {
    "": "All",
    "live": "Live",
    "waiting": "Waiting",
    "failed": "With failures",
    "scheduled": "Scheduled",
}


async def overview(visit: Visit) -> Page:
    live = await _live_jobs(visit)
    runs = [job.latest_run for job in live if job.latest_run is not None]
    waiting = [run for run in runs if run.stats.pending + run.stats.retrying]
    recent = await latest_jobs(visit, JOBS_SHOWN)
    charted_jobs = [*live, *recent]
    hours = _hours_for(visit, charted_jobs)
    chart = await _chart_of_last_hours(visit, charted_jobs, hours)
    staff = await live_workers(visit.env)
    values = {
        "live": live,
        "recent": [job for job in recent if job.latest_run is None or job.latest_run.terminal],
        "rate": sum(run.rate_per_s or 0.0 for run in runs),
        "backlog": sum(run.stats.pending + run.stats.retrying for run in runs),
        "inflight": sum(run.stats.inflight for run in runs),
        "oldest": min((run.created_at for run in waiting), default=None),
        "chart": chart,
        "period": "hour" if hours == 1 else f"{hours} hours",
        "sum": chart.sum,
        "slots": sum(worker.usable_slots for worker in staff),
        "busy": sum(worker.inflight for worker in staff),
    }
    return Page("overview.html", values)


def _hours_for(visit: Visit, jobs: Iterable[JobResponse]) -> int:
    """The hours that the chart shows: one while no run is older, so that it is not empty."""
    began_at = [seconds_of(job.latest_run.created_at) for job in jobs if job.latest_run]
    is_young = visit.env.now() - min(began_at, default=-math.inf) < 3600.0
    return 1 if is_young else CHART_HOURS


async def _chart_of_last_hours(visit: Visit, jobs: Iterable[JobResponse], hours: int) -> Chart:
    """What ended in the last hours in the latest runs of these jobs."""
    now = visit.env.now()
    since = now - hours * 3600.0
    buckets: list[SeriesBucket] = []
    for run in {job.latest_run.run_id: job.latest_run for job in jobs if job.latest_run}.values():
        begins = seconds_of(run.created_at)
        ends = seconds_of(run.updated_at) if run.terminal else now
        if ends < since or not run.stats.completed:
            continue
        # A short run has no samples: its series is one bucket, which its stats have too.
        if ends - begins < _UNSAMPLED_S:
            buckets.append(_whole(run, ends))
        else:
            client = await visit.client_for(run.job_id)
            ids = {"job_id": run.job_id, "run_id": run.run_id}
            buckets += (await client.get("getJobRunSeries", ids)).buckets
    return make_chart(buckets, since=since, until=now)


def _whole(run: RunResponse, ends: float) -> SeriesBucket:
    return SeriesBucket(
        since=run.created_at,
        until=instant(ends),
        successful=run.stats.successful,
        failed=run.stats.failed,
        failure_reasons=run.stats.failure_reasons,
        bytes=run.stats.stored_bytes,
        spend=run.stats.spend,
    )


async def jobs(visit: Visit) -> Page | Redirect:
    text = visit.query.get("q", "").strip()
    chosen = visit.query.get("show", "")
    if _ULID.match(text):
        return Redirect(f"/ui/jobs/{text}")
    listed_jobs, cursor = await _find_jobs(visit, text, chosen)
    return Page(
        "jobs.html",
        {
            "jobs": listed_jobs,
            "filters": JOB_FILTERS,
            "chosen": chosen,
            "text": text,
            "caller": visit.query.get("caller", ""),
            "more": _with(visit, "/ui/jobs", cursor=cursor) if cursor else None,
        },
    )


async def _find_jobs(
    visit: Visit, text: str, chosen: str
) -> tuple[Sequence[JobResponse], str | None]:
    client = _list_client(visit)
    if client is None:
        jobs = {job.job_id: job for job in await latest_jobs(visit, JOBS_SHOWN)}
        if chosen in {"", "scheduled"}:
            # A job whose first run has yet to come is not among those whose runs changed lately.
            jobs |= {job.job_id: job for job in await _due_jobs(visit)}
        newest_first = [jobs[job_id] for job_id in sorted(jobs, reverse=True)]
        return _filtered(newest_first, text, chosen), None
    limit, cursor = str(JOBS_SHOWN), visit.query.get("cursor")
    choices: dict[str, dict[str, str]] = {
        "": {},
        "live": {"run_status": _LIVE},
        "waiting": {"run_status": _LIVE},
        "failed": {"with_failures": "true"},
        "scheduled": {"type": "scheduled"},
    }
    options = choices.get(chosen, {})
    if not text:
        page = await client.get("listJobs", limit=limit, cursor=cursor, **options)
        return _filtered(page.jobs, "", chosen), page.next_cursor
    named = await client.get("listJobs", limit=limit, cursor=cursor, name=text, **options)
    if cursor is not None:
        return named.jobs, named.next_cursor
    tagged = await client.get("listJobs", limit=limit, external_id=text, **options)
    merged = {job.job_id: job for job in (*tagged.jobs, *named.jobs)}
    return _filtered(merged.values(), "", chosen), named.next_cursor


def _filtered(listed_jobs: Any, text: str, chosen: str) -> list[JobResponse]:
    """Applies what the API was not asked: `waiting`, and all filters for operators."""
    chosen_jobs = [job for job in listed_jobs if _is_chosen(job, chosen)]
    search_text = text.lower()
    return (
        [
            job
            for job in chosen_jobs
            if search_text in (job.name or "").lower() or text == job.external_id
        ]
        if text
        else chosen_jobs
    )


def _is_chosen(job: JobResponse, chosen: str) -> bool:
    run = job.latest_run
    if chosen == "scheduled":
        return job.schedule is not None
    if not chosen:
        return True
    if run is None:
        return False
    if chosen == "failed":
        return bool(run.stats.failed) or run.failure_reason is not None
    return not run.terminal and (chosen == "live" or run.waiting_on is not None)


def _list_client(visit: Visit) -> LocalClient | None:
    """The client for lists of jobs; None if they are those of all callers."""
    if not visit.viewer.is_operator:
        return visit.own()
    caller = visit.query.get("caller")
    return None if not caller else visit.client_of(CallerId(caller))


async def _live_jobs(visit: Visit) -> list[JobResponse]:
    if visit.viewer.is_operator:
        return await _jobs_of_runs(visit, await _runs(visit, RUN_LIVE, 0.0), JOBS_SHOWN)
    page = await visit.own().get("listJobs", run_status=_LIVE, limit=str(JOBS_SHOWN))
    live_jobs: list[JobResponse] = page.jobs
    return live_jobs


async def latest_jobs(visit: Visit, count: int) -> list[JobResponse]:
    """The latest jobs of the caller. Operators get those of all callers, fewer at most, because
    each is read by itself."""
    if visit.viewer.is_operator:
        runs = await _runs(visit, RUN_VISIBLE, visit.env.now() - _RECENT_S)
        return await _jobs_of_runs(visit, runs, min(count, JOBS_SHOWN))
    page = await visit.own().get("listJobs", limit=str(count))
    recent_jobs: list[JobResponse] = page.jobs
    return recent_jobs


async def _runs(visit: Visit, statuses: Any, since: float) -> list[Run]:
    """Runs of all callers, newest first. Only operators get here."""
    assert visit.viewer.is_operator
    runs: list[Run] = []
    after = None
    while len(runs) < _RECENT_RUNS_MAX:
        query = RunsIn(statuses=statuses, updated_since=since, after=after, limit=500)
        page = await visit.env.store.find(query)
        runs += page
        if len(page) < 500:
            break
        after = page[-1].run_id
    return runs[::-1]


async def _jobs_of_runs(visit: Visit, runs: Sequence[Run], count: int) -> list[JobResponse]:
    owners = {run.job_id: run.caller for run in reversed(runs)}
    jobs: list[JobResponse] = []
    for job_id in sorted(owners, reverse=True):
        try:
            jobs.append(await visit.client_of(owners[job_id]).get("getJob", {"job_id": job_id}))
        except NotFound:
            continue  # Deleted since.
        if len(jobs) == count:
            break
    return jobs


async def job(visit: Visit) -> Page | Redirect:
    """The job: its runs and its settings. A link without a run leads here."""
    client = await visit.client_for(visit.ids["job_id"])
    ids = {"job_id": visit.ids["job_id"]}
    job_response = await client.get("getJob", ids)
    runs = await client.get("listJobRuns", ids, limit="50", cursor=visit.query.get("cursor"))
    values = {
        "job": job_response,
        "runs": runs.runs,
        "caller": client.principal.caller,
        "more": _with(visit, f"/ui/jobs/{job_response.job_id}", cursor=runs.next_cursor)
        if runs.next_cursor
        else None,
        "done": visit.query.get("done", ""),
    }
    return Page("job.html", values)


async def load_run(visit: Visit) -> tuple[LocalClient, dict[str, Any]]:
    """The job and the run of the path, for every page of a run."""
    client = await visit.client_for(visit.ids["job_id"])
    ids = {"job_id": visit.ids["job_id"], "run_id": visit.ids["run_id"]}
    job_response = await client.get("getJob", ids)
    run = job_response.latest_run
    if run is None or run.run_id != ids["run_id"]:
        run = await client.get("getJobRun", ids)
    return client, {
        "job": job_response,
        "run": run,
        "is_latest": job_response.latest_run is not None
        and job_response.latest_run.run_id == run.run_id,
        "base": f"/ui/jobs/{ids['job_id']}/runs/{ids['run_id']}",
        "caller": client.principal.caller,
        "done": visit.query.get("done", ""),
    }


async def run(visit: Visit) -> Page:
    client, values = await load_run(visit)
    ids = {"job_id": visit.ids["job_id"], "run_id": visit.ids["run_id"]}
    run_response = values["run"]
    flying = None if run_response.terminal else await client.get("listJobRunFetches", ids)
    values["flying"] = flying.fetches if flying else []
    failed = run_response.stats.failed
    sample = (
        await client.get("listRunResults", ids, status="failed", limit="10") if failed else None
    )
    values["failures"] = sample.results if sample else []
    values["chart"] = await _chart_of(client, run_response, ids)
    values["bad_hosts"] = [] if visit.is_update else await _bad_hosts(client, run_response, ids)
    values["sampled"] = _FAILED_READ_MAX
    values["export"] = await _export(visit, client, ids)
    values["crawl"] = await _crawl(client, values["job"])
    return Page("run.html", values)


async def _crawl(client: LocalClient, job_response: JobResponse) -> Any:
    if job_response.type is not JobType.CRAWL:
        return None
    try:
        return await client.get("getCrawl", {"crawl_id": job_response.job_id}, limit="1")
    except NotFound:
        return None


async def _chart_of(client: LocalClient, run: RunResponse, ids: Mapping[str, str]) -> Chart | None:
    if not run.stats.completed:
        return None
    buckets = (await client.get("getJobRunSeries", ids)).buckets
    until = seconds_of(buckets[-1].until)
    return make_chart(buckets, since=seconds_of(run.created_at), until=until)


async def _bad_hosts(
    client: LocalClient, run: RunResponse, ids: Mapping[str, str]
) -> list[tuple[str, int]]:
    """The hosts with the most failed tasks, from the first failed tasks of the run."""
    if not run.stats.failed:
        return []
    limit = str(_FAILED_READ_MAX)
    page = await client.get("listRunResults", ids, status="failed", limit=limit)
    return Counter(host_of(task.url) or "" for task in page.results).most_common(_HOSTS_SHOWN)


async def _export(visit: Visit, client: LocalClient, ids: Mapping[str, str]) -> Any:
    export_id = visit.query.get("export")
    if not export_id:
        return None
    try:
        return await client.get("getResultsExport", {**ids, "export_id": export_id})
    except NotFound:
        return None


async def export_file(visit: Visit) -> Response | Download:
    client = await visit.client_for(visit.ids["job_id"])
    return await client.fetch("getResultsExportContent", visit.ids)


async def tasks(visit: Visit) -> Page:
    client, values = await load_run(visit)
    ids = {"job_id": visit.ids["job_id"], "run_id": visit.ids["run_id"]}
    chosen = {
        name: value
        for name in ("status", "reason", "host", "text", "order")
        if (value := visit.query.get(name, "").strip())
    }
    is_small = values["run"].stats.total <= _SMALL_RUN
    chosen.setdefault("order", "list" if is_small else "id")
    page = await client.get(
        "listRunResults",
        ids,
        limit=str(TASKS_SHOWN),
        cursor=visit.query.get("cursor"),
        **chosen,
    )
    path = f"{values['base']}/tasks"
    more = _with(visit, path, cursor=page.next_cursor) if page.next_cursor else None
    return Page("tasks.html", {**values, "tasks": page.results, "chosen": chosen, "more": more})


async def hosts(visit: Visit) -> Page:
    client, values = await load_run(visit)
    ids = {"job_id": visit.ids["job_id"], "run_id": visit.ids["run_id"]}
    figures = await client.get("listRunHosts", ids)
    return Page("hosts.html", {**values, "figures": figures})


async def timeline(visit: Visit) -> Page:
    """What happened to this run, from the caller's event log, newest first."""
    client, values = await load_run(visit)
    run_id, run_events = visit.ids["run_id"], []
    after = await _position_before(client, seconds_of(values["run"].created_at) - _SKEW_S)
    for _ in range(_EVENT_PAGES_MAX):
        page = await client.get("listEvents", after=after, limit=str(_EVENTS_READ))
        run_events += [event for event in page.events if event.data.get("run_id") == run_id]
        if len(page.events) < _EVENTS_READ:
            break
        after = page.last_id
    return Page("timeline.html", {**values, "events": run_events[::-1]})


async def _position_before(client: LocalClient, at: float) -> str:
    """A position in the event log that all events since `at` follow, found by halving: reading a
    long log from its beginning would not come to the latest runs."""
    low, high = 0, int((await client.get("listEvents", after="latest")).last_id)
    while high - low > _EVENTS_READ:
        middle = (low + high) // 2
        page = await client.get("listEvents", after=str(middle), limit="1")
        if page.events and seconds_of(page.events[0].occurred_at) >= at:
            high = middle
        else:
            low = middle
    return str(low)


async def task(visit: Visit) -> Page:
    client, values = await load_run(visit)
    task_response = await client.get("getRunTask", visit.ids)
    history = await client.get("getRunTaskHistory", visit.ids)
    return Page("task.html", {**values, "task": task_response, "attempts": history.events})


async def preview(visit: Visit) -> Response:
    """The start of the body, for the sandboxed frame of the task page."""
    client = await visit.client_for(visit.ids["job_id"])
    task_content = await client.fetch("getRunTaskContent", visit.ids)
    if isinstance(task_content, Response):
        raise NotFound("The task has no body.")
    content = b""
    async for piece in task_content.pieces:
        content += piece
        if len(content) >= PREVIEW_BYTES_MAX:
            break
    await task_content.pieces.aclose()
    kind = task_content.headers["Content-Type"]
    is_page = kind.partition(";")[0].strip().lower() in {"text/html", "application/xhtml+xml"}
    media_type = "text/html; charset=utf-8" if is_page else "text/plain; charset=utf-8"
    return Response(200, content[:PREVIEW_BYTES_MAX], media_type, dict(PREVIEW_HEADERS))


async def content(visit: Visit) -> Response | Download:
    client = await visit.client_for(visit.ids["job_id"])
    return await client.fetch("getRunTaskContent", visit.ids)


async def new_job(visit: Visit) -> Page:
    visit.viewer.require_change()
    visit.own()
    return Page("new_job.html", new_job_values(visit))


def new_job_values(visit: Visit) -> dict[str, Any]:
    """The empty form, with what holds for its empty fields."""
    usual = {
        "max_inflight": visit.env.config.max_inflight,
        "max_attempts": limits.MAX_ATTEMPTS,
        "result_ttl_days": min(limits.RESULT_TTL_DAYS, visit.env.config.body_days),
    }
    return {"filled": {}, "checked": None, "error": None, "usual": usual}


async def confirm_delete_job(visit: Visit) -> Page:
    client = await visit.client_for(visit.ids["job_id"])
    job_response = await client.get("getJob", visit.ids)
    return Page("delete.html", {"job": job_response, "run": None})


async def confirm_delete_run(visit: Visit) -> Page:
    _, values = await load_run(visit)
    return Page("delete.html", values)


async def schedules(visit: Visit) -> Page:
    client = _list_client(visit)
    if client is None and visit.viewer.principal is not None:
        client = visit.own()
    done = visit.query.get("done", "")
    if client is None:
        jobs = await _scheduled_jobs(visit)
        return Page("schedules.html", {"jobs": jobs, "more": None, "done": done})
    page = await client.get(
        "listJobs", type="scheduled", limit="50", cursor=visit.query.get("cursor")
    )
    more = _with(visit, "/ui/schedules", cursor=page.next_cursor) if page.next_cursor else None
    return Page("schedules.html", {"jobs": page.jobs, "more": more, "done": done})


async def _scheduled_jobs(visit: Visit) -> list[JobResponse]:
    """Scheduled jobs of all callers: those that run next, and those that ran lately and are
    paused now. Only operators get here."""
    paused = ScheduleStatus.PAUSED
    recent = await latest_jobs(visit, JOBS_SHOWN)
    return await _due_jobs(visit) + [job for job in recent if job.schedule_state is paused]


async def _due_jobs(visit: Visit) -> list[JobResponse]:
    """The jobs of all callers that run next. Only operators get here."""
    assert visit.viewer.is_operator
    due_by = visit.env.now() + _SCHEDULES_AHEAD_S
    query = DueSchedules(statuses=SCHEDULE_FIRES, due_by=due_by, limit=JOBS_SHOWN)
    jobs: list[JobResponse] = []
    for schedule in await visit.env.store.find(query):
        with suppress(NotFound):  # Deleted since.
            client = await visit.client_for(schedule.job_id)
            jobs.append(await client.get("getJob", {"job_id": schedule.job_id}))
    return jobs


async def system(visit: Visit) -> Page:
    is_operator = visit.viewer.is_operator
    usage = None
    if visit.viewer.principal is not None:
        usage = (await visit.own().get("listQuotas")).quotas
    values: dict[str, Any] = {
        "workers": await live_workers(visit.env),
        "quotas": usage,
        "tree": None,
        "engine": None,
        "disk": None,
        "stored": [] if visit.is_update else await _stored_jobs(visit),
        "engine_name": visit.system.engine,
    }
    if is_operator:
        tree = visit.system.tree
        values["tree"] = None if tree is None else list(tree_lines(tree()))
        values["engine"] = engine_calls(visit.api.metrics.registry)
        values["disk"] = disk(visit.api.metrics.registry)
    return Page("system.html", values)


class StoredPages(NamedTuple):
    """What the runs of a job have stored and not lost to expiry."""

    job: JobResponse
    bytes: int
    runs: int


async def _stored_jobs(visit: Visit) -> list[StoredPages]:
    """The latest jobs with stored pages, the largest first."""
    jobs = await latest_jobs(visit, _STORED_JOBS_READ)
    stored = [await _stored_pages(visit, job) for job in jobs if job.latest_run]
    return sorted((row for row in stored if row.bytes), key=attrgetter("bytes"), reverse=True)


async def _stored_pages(visit: Visit, job: JobResponse) -> StoredPages:
    assert job.latest_run is not None
    runs = [job.latest_run]
    if job.latest_run.run_sequence > 1:
        client = await visit.client_for(job.job_id)
        runs = (await client.get("listJobRuns", {"job_id": job.job_id}, limit="100")).runs
    now = instant(visit.env.now())
    current_runs = [
        run for run in runs if run.results_expire_at is None or run.results_expire_at > now
    ]
    return StoredPages(job, sum(run.stats.stored_bytes for run in current_runs), len(current_runs))


def _with(visit: Visit, path: str, **more: str | None) -> str:
    """A link to the same list with other parameters."""
    parameters = {name: value for name, value in {**visit.query, **more}.items() if value}
    parameters.pop("done", None)
    return f"{path}?{urlencode(parameters)}" if parameters else path
