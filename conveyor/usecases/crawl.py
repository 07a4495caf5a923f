"""Crawls: created, advanced step by step, stopped and shown (docs/crawls.md).

A crawl is an intent on a row. Any process can take the next step of it: all that a step needs is
read from rows and stored bodies, and what it changes is one guarded change.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

import msgspec
import trio

from conveyor.domain import limits
from conveyor.domain.changes import Applied, Change, CrawlKey, Guard, JobKey, RunKey, Update
from conveyor.domain.crawl import frontier
from conveyor.domain.crawl.frontier import Source, StepPlanner
from conveyor.domain.crawl.links import Reading, read_page, read_sitemap
from conveyor.domain.crawl.robots import RobotsRules, deny_all, is_without_rules, rules_in
from conveyor.domain.crawl.urls import host_in, normalize, origin_of
from conveyor.domain.crawl_record import (
    Crawl,
    CrawlEnd,
    CrawlEntry,
    CrawlRules,
    CrawlStatus,
    CrawlStep,
    EntryKind,
    robots_id,
    run_of,
)
from conveyor.domain.errors import Conflict, NotFound
from conveyor.domain.ids import CallerId, JobId, TaskId, is_ulid, shard_of
from conveyor.domain.lifecycle import (
    CRAWL_LIVE,
    JOB_VISIBLE,
    RUN_LIVE,
    TASK_TERMINAL,
    accepts_lists,
)
from conveyor.domain.model import (
    Format,
    HostLimit,
    HostLimits,
    Job,
    JobStatus,
    JobType,
    Run,
    Task,
    TaskRef,
)
from conveyor.domain.queries import CrawlStepsOf, DueCrawls, TasksAt
from conveyor.ports.errors import BlobMissing, StorageDamaged, Unavailable
from conveyor.usecases.context import AGAIN, Again, Context, retry_or_refuse
from conveyor.usecases.lookup import totals_of
from conveyor.usecases.run import runs
from conveyor.usecases.submit import jobs
from conveyor.usecases.submit.jobs import Submission

# Steps of the log that are looked at together, and those of them that one change touches: a change
# of a store has a limited number of writes.
_WINDOW_STEPS, _TOUCHED_STEPS_MAX = 64, 8
# Windows that one look goes through, until it finds an entry that can be read. Beyond them, entries
# wait until one of those before them is fetched.
_WINDOWS_MAX = 16
# Entries that a step reads, by number and by bytes of their bodies.
_GROUP_ENTRIES, _GROUP_BYTES = 64, 16 * 1024 * 1024
# Tasks that a step adds at most; fewer where a change of the engine has room for fewer.
_ADDED_MAX = 500
_ADDED_MIN = 8
# Writes of a step besides the tasks and the counters of its shards.
_OTHER_WRITES = 18
# Tasks that are looked up in one query.
_LOOKUP = 200
# What a process remembers of one crawl: links to known pages need no read of the store.
_SEEN_MAX = 50_000

log = logging.getLogger(__name__)

NO_CRAWL = "There is no such crawl."


class CrawlNotFound(NotFound):
    """The crawl is unknown, deleted, or belongs to another caller."""

    code = "crawl_not_found"


class Advance(Enum):
    """How one step went."""

    ADVANCED = "links were followed"
    IDLE = "nothing can be read yet"
    LOST = "another process advances it"
    DONE = "nothing is left to do"


@dataclass(slots=True)
class CrawlMemory:
    """What a process remembers between two steps of a crawl. It saves work and decides nothing."""

    seen: dict[TaskId, None] = field(default_factory=dict)
    robots: dict[str, RobotsRules] = field(default_factory=dict)
    readings: dict[TaskId, Reading] = field(default_factory=dict)
    #: Tasks that had ended when nothing could be read: until another has, it is not worth a look.
    ended_at_rest: int | None = None

    def note_seen(self, task_ids: Iterable[TaskId]) -> None:
        self.seen.update(dict.fromkeys(task_ids))
        while len(self.seen) > _SEEN_MAX:
            del self.seen[next(iter(self.seen))]


# Requests.


async def create(
    env: Context, caller: CallerId, url: str, rules: CrawlRules, request: Submission, *, job_id: str
) -> Crawl:
    """Creates a crawl and the open job that it feeds. Repeated with its id, finds it."""
    existing = await of_job(env, JobId(job_id))
    if existing is not None and existing.caller == caller:
        return existing
    now = env.now()
    job = jobs.job_from(env, caller, request, JobId(job_id))
    run_id = run_of(job.job_id)
    host_limits = job.host_limits or HostLimits(HostLimit(limits.CRAWL_HOST_CONCURRENCY))
    job = msgspec.structs.replace(
        job,
        type=JobType.CRAWL,
        latest_run_id=run_id,
        active_run_id=run_id,
        format=rules.output or Format.HTML,
        host_limits=host_limits,
    )
    run = jobs.first_run(env, job)
    crawl = Crawl(
        job_id=job.job_id,
        run_id=run_id,
        caller=caller,
        status=CrawlStatus.RUNNING,
        url=url,
        rules=rules,
        created_at=now,
        updated_at=now,
        due_at=now,
    )
    await env.commit_with_events(frontier.new_crawl(job, run, crawl))
    stored = await of_job(env, job.job_id)
    assert stored is not None
    return stored


async def own(env: Context, caller: CallerId, crawl_id: str) -> Crawl:
    job = await env.store.read(JobKey(JobId(crawl_id))) if is_ulid(crawl_id) else None
    if job is None or job.caller != caller or job.status not in JOB_VISIBLE:
        raise CrawlNotFound(NO_CRAWL)
    crawl = await of_job(env, job.job_id)
    if crawl is None:
        raise CrawlNotFound(NO_CRAWL)
    return crawl


async def of_job(env: Context, job_id: JobId) -> Crawl | None:
    return await env.store.read(CrawlKey(job_id, run_of(job_id)))


async def stop(env: Context, caller: CallerId, crawl_id: str) -> Crawl:
    """Stops a running crawl. One that has ended stays as it ended."""
    crawl = await retry_or_refuse("The crawl is", partial(_try_stop, env, caller, crawl_id))
    await _end_job(env, crawl)
    return crawl


async def _try_stop(env: Context, caller: CallerId, crawl_id: str) -> Crawl | Again:
    crawl = await own(env, caller, crawl_id)
    if crawl.status not in CRAWL_LIVE:
        return crawl
    await env.commit(frontier.stop(crawl, ended_by=CrawlEnd.USER, error=None, now=env.now()))
    return AGAIN


async def load_kept_pages(
    env: Context, crawl: Crawl, *, step: int, skip: int, limit: int
) -> tuple[list[Task], int, int]:
    """Returns up to `limit` kept pages after `skip` of those of a step, in the order in which they
    were kept, and the place after them."""
    item_ids: list[TaskId] = []
    while len(item_ids) < limit:
        rows = await _steps(env, crawl, step)
        if not rows:
            break
        for row in rows:
            new = row.items[skip : skip + limit - len(item_ids)]
            item_ids += new
            if len(item_ids) == limit:
                step, skip = row.number, skip + len(new)
                break
            step, skip = row.number + 1, 0
    run = await env.store.read(RunKey(crawl.job_id, crawl.run_id))
    tasks = {} if run is None else await _tasks(env, run, item_ids)
    return [tasks[task_id] for task_id in item_ids if task_id in tasks], step, skip


# Steps.


async def due(env: Context, *, limit: int) -> list[Crawl]:
    return await env.store.find(DueCrawls(due_by=env.now(), limit=limit))


async def has_news(env: Context, crawl: Crawl, memory: CrawlMemory) -> bool:
    """Returns whether a task has ended since nothing could be read, or the run takes no lists any
    more: the next look would find nothing else."""
    run = await env.store.read(RunKey(crawl.job_id, crawl.run_id))
    if run is None or not accepts_lists(run):
        return True
    return (await totals_of(env, run)).done != memory.ended_at_rest


async def claim(env: Context, crawl: Crawl, *, due_in_s: float) -> Crawl | None:
    """Makes a crawl due later. Returns None if another process has it."""
    if crawl.status not in CRAWL_LIVE:
        return crawl
    now = env.now()
    return await _apply(env, frontier.claim(crawl, due_at=now + due_in_s, now=now))


async def give_up(env: Context, crawl: Crawl) -> None:
    """Ends a crawl that crashed its crawler again and again."""
    current = await of_job(env, crawl.job_id)
    if current is not None and current.status in CRAWL_LIVE:
        await env.commit(frontier.fail(current, now=env.now()))


async def advance(env: Context, crawl: Crawl, memory: CrawlMemory) -> tuple[Advance, Crawl | None]:
    """Takes one step, or ends the crawl. Returns the crawl as it is then."""
    if crawl.status not in CRAWL_LIVE:
        await _end_job(env, crawl)
        return Advance.DONE, None
    job = await env.store.read(JobKey(crawl.job_id))
    run = await env.store.read(RunKey(crawl.job_id, crawl.run_id))
    if job is None or run is None or job.status not in JOB_VISIBLE:
        # The deletion of the job also removes the crawl.
        await env.commit(frontier.forget(crawl))
        return Advance.DONE, None
    if job.status is not JobStatus.OPEN or not accepts_lists(run):
        return await _end(env, _stop_with(env, crawl, run))
    ended_by = frontier.find_reached_limit(crawl, now=env.now())
    if ended_by is not None or not crawl.waiting:
        return await _end(env, frontier.finish(crawl, ended_by=ended_by, now=env.now()))
    return await _take_step(env, crawl, job, run, memory)


def _stop_with(env: Context, crawl: Crawl, run: Run) -> Change:
    """Builds the end of a crawl whose run was ended by its caller or by an account-level error."""
    error = None
    if run.failure_reason is not None:
        error = (run.failure_reason.value, run.failure_detail or "The gateway refused the account.")
    ended_by = CrawlEnd.USER if error is None else None
    return frontier.stop(crawl, ended_by=ended_by, error=error, now=env.now())


async def _end(env: Context, change: Change) -> tuple[Advance, Crawl | None]:
    ended = await _apply(env, change)
    if ended is None:
        return Advance.LOST, None
    await _end_job(env, ended)
    return Advance.DONE, None


async def _end_job(env: Context, crawl: Crawl) -> None:
    """Closes the job of an ended crawl, and stops what is still being fetched. Repeated until the
    row records that it is done."""
    if crawl.due_at is None:
        return
    # It was deleted, or ended by itself, meanwhile.
    with suppress(NotFound, Conflict):
        await jobs.close(env, crawl.caller, crawl.job_id)
        run = await env.store.read(RunKey(crawl.job_id, crawl.run_id))
        job = await env.store.read(JobKey(crawl.job_id))
        is_latest = job is not None and job.latest_run_id == crawl.run_id
        if run is not None and run.status in RUN_LIVE and is_latest:
            await runs.stop(env, crawl.caller, crawl.job_id, reason=crawl.ended_by)
    await env.commit(frontier.forget(crawl))


async def _take_step(
    env: Context, crawl: Crawl, job: Job, run: Run, memory: CrawlMemory
) -> tuple[Advance, Crawl | None]:
    totals = await totals_of(env, run)
    read_to, steps, ready = await _find_ready(env, crawl, run)
    if any(step.number >= crawl.steps for step in steps):
        # The log is ahead of the row that was read: another process has taken a step.
        return Advance.LOST, None
    # First: the sitemaps that the start leads to are named there.
    robots = await _rules_of(env, crawl, run, [_start_origin(crawl)], memory)
    sources = await _read_entries(env, crawl, ready, memory)
    leads = [lead for source in sources for lead in frontier.leads_of(crawl, source)[1]]
    origins = dict.fromkeys(origin_of(lead.url) for lead in leads)
    robots |= await _rules_of(env, crawl, run, origins, memory)
    if await _apply_delays(env, job, robots):
        await trio.sleep(limits.CRAWL_LIMITS_S)
        return Advance.ADVANCED, crawl
    known = await _known(env, run, [lead.entry.task_id for lead in leads], memory)
    room = min(env.config.at_once_max - run.shard_count - _OTHER_WRITES, _ADDED_MAX)
    plan = StepPlanner(crawl, known=known, robots=robots, room=max(room, _ADDED_MIN))
    for source in sources:
        if not plan.take(source):
            break
    if not plan.done and not plan.added and plan.cut == (crawl.cut_task, crawl.cut_at):
        memory.ended_at_rest = totals.done
        return Advance.IDLE, None
    memory.ended_at_rest = None
    now = env.now()
    due_at = now + limits.CRAWL_CLAIM_S
    change = frontier.step_change(plan, job, run, steps, read_to=read_to, due_at=due_at, now=now)
    advanced = await _apply(env, change)
    if advanced is None:
        return Advance.LOST, None
    memory.note_seen(plan.added)
    for task_id in plan.done:
        memory.readings.pop(task_id, None)
    if plan.added:
        await env.signals.run_changed(run.job_id, run.run_id, len(plan.added))
    return Advance.ADVANCED, advanced


async def _apply(env: Context, change: Change) -> Crawl | None:
    """Applies a change whose first write is that of the crawl. Returns None if it was refused."""
    verdict = await env.commit(change)
    if not isinstance(verdict, Applied):
        return None
    crawl = verdict.rows[0]
    assert isinstance(crawl, Crawl)
    return crawl


Ready = list[tuple[CrawlEntry, Task | None]]
"""Entries that can be read, each with its task; the start has none."""


async def _find_ready(env: Context, crawl: Crawl, run: Run) -> tuple[int, list[CrawlStep], Ready]:
    """Finds the first step that has entries, and a group of entries whose fetch has ended."""
    read_to = first = crawl.read_to
    level, windows_count = None, 0
    while windows_count < _WINDOWS_MAX:
        steps = await _steps(env, crawl, first)
        if level is None:
            # Steps without entries were read out of order. All of them are passed.
            level = frontier.first_level(steps)
            read_to = next((step.number for step in steps if step.waiting), first + len(steps))
        windows_count += level is not None
        entries = frontier.entries_to_read(crawl, steps, level)
        ready = await _ready_of(env, run, steps, entries)
        if ready or len(steps) < _WINDOW_STEPS:
            return read_to, steps, ready
        first = steps[-1].number + 1
    return read_to, [], []


async def _steps(env: Context, crawl: Crawl, first: int) -> list[CrawlStep]:
    return await env.store.find(
        CrawlStepsOf(job_id=crawl.job_id, run_id=crawl.run_id, first=first, limit=_WINDOW_STEPS)
    )


async def _ready_of(
    env: Context, run: Run, steps: Sequence[CrawlStep], entries: Sequence[CrawlEntry]
) -> Ready:
    number_of = {entry.task_id: step.number for step in steps for entry in step.waiting}
    ready: Ready = []
    touched: set[int] = set()
    size_bytes = 0
    for first in range(0, len(entries), _LOOKUP):
        page = entries[first : first + _LOOKUP]
        tasks = await _tasks(env, run, [entry.task_id for entry in page])
        for entry in page:
            task = tasks.get(entry.task_id)
            is_ended = task is not None and task.status in TASK_TERMINAL
            if not is_ended and entry.kind is not EntryKind.START:
                continue
            touched.add(number_of[entry.task_id])
            size_bytes += task.result.size_bytes if task is not None and task.result else 0
            is_full = len(ready) == _GROUP_ENTRIES or size_bytes > _GROUP_BYTES
            if ready and (is_full or len(touched) > _TOUCHED_STEPS_MAX):
                return ready
            ready.append((entry, task))
    return ready


async def _tasks(env: Context, run: Run, task_ids: Sequence[TaskId]) -> dict[TaskId, Task]:
    tasks: dict[TaskId, Task] = {}
    for first in range(0, len(task_ids), _LOOKUP):
        refs = tuple(
            TaskRef(run.job_id, run.run_id, task_id, shard_of(task_id, run.shard_count))
            for task_id in task_ids[first : first + _LOOKUP]
        )
        tasks |= {task.task_id: task for task in await env.store.find(TasksAt(refs=refs))}
    return tasks


async def _known(
    env: Context, run: Run, task_ids: Sequence[TaskId], memory: CrawlMemory
) -> frozenset[TaskId]:
    """Returns which of these pages are known. The tasks are the set of pages that were seen."""
    distinct = dict.fromkeys(task_ids)
    remembered = frozenset(task_id for task_id in distinct if task_id in memory.seen)
    stored = await _tasks(env, run, [task_id for task_id in distinct if task_id not in remembered])
    memory.note_seen(stored)
    return remembered | stored.keys()


async def _read_entries(
    env: Context, crawl: Crawl, ready: Ready, memory: CrawlMemory
) -> list[Source]:
    """Finds the links of fetched pages. A page that was read for the last step, and whose links
    were not all followed, is not read again."""
    remembered = memory.readings
    memory.readings = {
        entry.task_id: remembered[entry.task_id]
        for entry, _ in ready
        if entry.task_id in remembered
    }
    fetched = {
        entry.task_id: (entry, task)
        for entry, task in ready
        if task is not None and entry.task_id not in memory.readings
    }
    bodies = await _bodies(env, [task for _, task in fetched.values()])
    read = partial(
        _read_bodies, crawl, [(*fetched[task_id], body) for task_id, body in bodies.items()]
    )
    # In the executor: finding the links of large pages would block the heartbeats.
    memory.readings |= await env.executor.run(read)
    start = frontier.start_reading(crawl, memory.robots.get(_start_origin(crawl)))
    return [
        Source(entry, crawl.url, start)
        if task is None
        else Source(entry, task.url, memory.readings.get(entry.task_id))
        for entry, task in ready
    ]


def _start_origin(crawl: Crawl) -> str:
    start = normalize(crawl.url)
    assert start is not None
    return origin_of(start)


def _read_bodies(
    crawl: Crawl, pages: Sequence[tuple[CrawlEntry, Task, bytes]]
) -> dict[TaskId, Reading]:
    link_filter = frontier.filter_of(crawl)
    readings: dict[TaskId, Reading] = {}
    for entry, task, body in pages:
        assert task.result is not None
        if entry.kind is EntryKind.SITEMAP:
            readings[entry.task_id] = read_sitemap(task.url, body, link_filter)
        else:
            readings[entry.task_id] = read_page(
                task.url,
                body,
                task.result.content_type,
                task.result.final_url,
                link_filter,
                is_markdown=crawl.rules.output is Format.MARKDOWN,
                follows_canonical=crawl.rules.follows_canonical,
            )
    return readings


async def _bodies(env: Context, tasks: Sequence[Task]) -> dict[TaskId, bytes]:
    """Reads the bodies of tasks together. One that is missing or damaged is left out."""
    bodies: dict[TaskId, bytes] = {}
    # Collected instead of raised, because a nursery would wrap them in an exception group.
    failures: list[Unavailable] = []

    async def read(task_id: TaskId, key: str) -> None:
        try:
            async with aclosing(env.blobs.open(key)) as pieces:
                bodies[task_id] = b"".join([piece async for piece in pieces])
        except (BlobMissing, StorageDamaged):
            log.warning("page of a crawl not readable", extra={"task": task_id})
        except Unavailable as error:
            failures.append(error)

    async with trio.open_nursery() as nursery:
        for task in tasks:
            if task.result is not None:
                nursery.start_soon(read, task.task_id, task.result.key)
    if failures:
        raise failures[0]
    return bodies


async def _rules_of(
    env: Context, crawl: Crawl, run: Run, origins: Iterable[str], memory: CrawlMemory
) -> dict[str, RobotsRules | None]:
    """Returns the rules of these origins: None while their robots.txt is being fetched, nothing if
    it was not asked for."""
    if not crawl.rules.obeys_robots:
        return {}
    rules: dict[str, RobotsRules | None] = {
        origin: memory.robots[origin] for origin in origins if origin in memory.robots
    }
    ids = {robots_id(run.run_id, origin): origin for origin in origins if origin not in rules}
    tasks = await _tasks(env, run, list(ids))
    ended = [task for task in tasks.values() if task.status in TASK_TERMINAL]
    bodies = await _bodies(env, ended)
    rules |= {ids[task_id]: None for task_id in tasks}
    if ended:
        # In the executor: a large file takes longer to read than a heartbeat can wait.
        known = await env.executor.run(partial(_read_rules, ended, bodies))
        known_rules = {ids[task_id]: of_origin for task_id, of_origin in known.items()}
        memory.robots |= known_rules
        rules |= known_rules
    return rules


def _read_rules(tasks: Sequence[Task], bodies: Mapping[TaskId, bytes]) -> dict[TaskId, RobotsRules]:
    return {task.task_id: _rules_from(task, bodies.get(task.task_id)) for task in tasks}


def _rules_from(task: Task, body: bytes | None) -> RobotsRules:
    if task.result is not None and task.result.http_status >= 400:
        return RobotsRules()
    if body is not None:
        return rules_in(body)
    has_none = task.problem and is_without_rules(task.problem.code, task.problem.status)
    return RobotsRules() if has_none else deny_all(task.problem)


async def _apply_delays(env: Context, job: Job, robots: Mapping[str, RobotsRules | None]) -> bool:
    """Makes the crawl delays of these origins limits of the job. Returns whether one is new."""
    if job.host_limits is None:
        return False
    hosts = dict(job.host_limits.hosts)
    for origin, rules in robots.items():
        if rules is None or not rules.crawl_delay_s:
            continue
        host, rate_per_s = host_in(origin), 1 / rules.crawl_delay_s
        limit = job.host_limits.limit_for(host)
        if limit.rate_per_s is None or limit.rate_per_s > rate_per_s:
            hosts[host] = msgspec.structs.replace(limit, rate_per_s=rate_per_s)
    if hosts == job.host_limits.hosts:
        return False
    limited = msgspec.structs.replace(job.host_limits, hosts=hosts)
    values = {"host_limits": limited, "updated_at": env.now()}
    await env.commit(Change((Update(JobKey(job.job_id), Guard(status_in=JOB_VISIBLE), values),)))
    return True
