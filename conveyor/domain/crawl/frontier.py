"""The frontier of a crawl: what a step adds, keeps and leaves, as one guarded change
(docs/crawls.md, Steps).

Every step raises the version of the crawl, so of several processes one advances it. A step reads
the links of some fetched pages. It inserts the pages that they lead to, as tasks whose ids follow
from their URLs, together with the note that the links were followed. So a page is found once, and
its links are followed once, whatever is killed or repeated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from conveyor.domain import lifecycle
from conveyor.domain.changes import Change, CrawlKey, CrawlStepKey, Guard, Insert, Update, Write
from conveyor.domain.crawl.links import Reading
from conveyor.domain.crawl.robots import ROBOTS_STATUSES, RobotsRules
from conveyor.domain.crawl.urls import LinkFilter, host_in, normalize, origin_of, site_of
from conveyor.domain.crawl_record import (
    Crawl,
    CrawlEnd,
    CrawlEntry,
    CrawlStep,
    Discovery,
    EntryKind,
    page_id,
    robots_id,
    sitemap_id,
)
from conveyor.domain.ids import BatchId, TaskId, shard_of
from conveyor.domain.lifecycle import CRAWL, CrawlEvent
from conveyor.domain.model import Job, Run, Task, TaskStatus
from conveyor.domain.submit import admission

SEED_UNREACHABLE, INTERNAL_ERROR = "seed_unreachable", "internal_error"
# Links of one entry that one step looks at. More make a step of a long sitemap slow.
_LOOKED_AT_MAX = 2_000


class Source(msgspec.Struct, frozen=True):
    """An entry whose links can be followed now. `reading` is None if its fetch failed."""

    entry: CrawlEntry
    url: str
    reading: Reading | None


class Lead(msgspec.Struct, frozen=True):
    """A page or a sitemap that an entry leads to."""

    url: str
    entry: CrawlEntry


class NewTask(msgspec.Struct, frozen=True):
    """A task to add: that of an entry, or that of a robots.txt, which is no entry."""

    task_id: TaskId
    url: str
    entry: CrawlEntry | None


def filter_of(crawl: Crawl) -> LinkFilter:
    start = normalize(crawl.url)
    assert start is not None
    return LinkFilter(site_of(host_in(start)), crawl.rules.include, crawl.rules.exclude)


def entries_to_read(
    crawl: Crawl, steps: Sequence[CrawlStep], level: int | None
) -> list[CrawlEntry]:
    """Returns the entries whose links may be followed now, in the order of the log. `level` is that
    of the first entry that waits.

    With a limit of depth, a level is read as a whole before the next: so the depth of a page is its
    distance from the start, and not the length of the way that was found first. The log is in the
    order of depth, because an entry is found by one of the level that is being read.
    """
    waiting = [entry for step in steps for entry in step.waiting]
    # A page of which only some links were followed comes first: there is never a second one.
    waiting.sort(key=lambda entry: entry.task_id != crawl.cut_task)
    has_levels = crawl.rules.depth is not None
    return [entry for entry in waiting if not has_levels or entry.depth == level]


def first_level(steps: Sequence[CrawlStep]) -> int | None:
    return min((entry.depth for step in steps for entry in step.waiting), default=None)


def leads_of(crawl: Crawl, source: Source) -> tuple[int, list[Lead], bool]:
    """Returns the next links of an entry, the number of those before them, and whether they are
    the last ones."""
    reading, entry, run_id = source.reading, source.entry, crawl.run_id
    first = crawl.cut_at if entry.task_id == crawl.cut_task else 0
    if reading is None:
        return first, [], True
    pages, sitemaps = _urls_to_follow(crawl, entry, reading), reading.sitemaps
    depth = _depth_below(crawl, entry)
    until = first + _LOOKED_AT_MAX
    leads = [
        Lead(url, CrawlEntry(page_id(run_id, url), depth, EntryKind.PAGE))
        for url in pages[first:until]
    ]
    behind = max(first - len(pages), 0), max(until - len(pages), 0)
    leads += [
        Lead(url, CrawlEntry(sitemap_id(run_id, url), depth, EntryKind.SITEMAP))
        for url in sitemaps[slice(*behind)]
    ]
    return first, leads, until >= len(pages) + len(sitemaps)


def _urls_to_follow(crawl: Crawl, entry: CrawlEntry, reading: Reading) -> tuple[str, ...]:
    rules = crawl.rules
    if reading.moved_to is not None:
        return (reading.moved_to,) if reading.moved_to else ()
    if entry.kind is not EntryKind.PAGE:
        return reading.links
    is_deepest = rules.depth is not None and entry.depth >= rules.depth
    return () if is_deepest or Discovery.LINKS not in rules.discovery else reading.links


def _depth_below(crawl: Crawl, entry: CrawlEntry) -> int:
    if entry.kind is EntryKind.START:
        return 0
    # A redirect, a canonical link and a sitemap also lead out of the deepest level.
    depth_max = crawl.rules.depth
    return entry.depth + 1 if depth_max is None else min(entry.depth + 1, depth_max)


def start_reading(crawl: Crawl, robots: RobotsRules | None) -> Reading:
    """Returns what the caller asked for: the start page, and the sitemaps if they are wanted."""
    start, rules = normalize(crawl.url), crawl.rules
    assert start is not None
    if Discovery.SITEMAP not in rules.discovery:
        return Reading(links=(start,))
    site = filter_of(crawl)
    named = rules.sitemaps or (robots.sitemaps if robots is not None else ())
    forms = [form for url in named if (form := normalize(url)) and site.is_on_site(form)]
    forms = forms or [f"{origin_of(start)}/sitemap.xml"]
    return Reading(links=(start,), sitemaps=tuple(dict.fromkeys(forms)))


class StepPlanner:
    """Plans one step. `known` are tasks that exist, `robots` the rules by origin: None while they
    are being fetched, absent if they were not requested yet. `room` is how many tasks the step may
    add."""

    def __init__(
        self,
        crawl: Crawl,
        *,
        known: Collection[TaskId],
        robots: Mapping[str, RobotsRules | None],
        room: int,
    ) -> None:
        self.crawl = crawl
        self.added: dict[TaskId, NewTask] = {}
        self.items: list[TaskId] = []
        self.done: set[TaskId] = set()
        self.fetched = self.failed = self.pages = self.duplicates = 0
        self.hosts = dict.fromkeys(crawl.hosts)
        self.is_cut_off = crawl.is_cut_off
        self.cut: tuple[TaskId | None, int] = (crawl.cut_task, crawl.cut_at)
        self.error = (crawl.error_code, crawl.error_detail)
        self._known = known
        self._robots = robots
        self._room = room
        self._filter = filter_of(crawl)

    def take(self, source: Source) -> bool:
        """Adds what the entry leads to. Returns False if the step is full and ends here."""
        first, leads, is_end = leads_of(self.crawl, source)
        if not self._has_rules(leads):
            return len(self.added) < self._room
        for at, lead in enumerate(leads, first):
            if not self._add(lead, source.entry):
                self.cut = (source.entry.task_id, at)
                return False
        if not is_end:
            self.cut = (source.entry.task_id, first + len(leads))
            return False
        self._finish(source)
        return True

    def _has_rules(self, leads: Sequence[Lead]) -> bool:
        """Returns whether the robots.txt of all pages is known. Asks for the others."""
        if not self.crawl.rules.obeys_robots:
            return True
        origins = dict.fromkeys(
            origin_of(lead.url)
            for lead in leads
            if lead.entry.task_id not in self._known and self._admits(lead.url)
        )
        for origin in origins:
            task_id = robots_id(self.crawl.run_id, origin)
            if origin not in self._robots and len(self.added) < self._room:
                self.added[task_id] = NewTask(task_id, f"{origin}/robots.txt", None)
        return all(self._robots.get(origin) is not None for origin in origins)

    def _admits(self, url: str) -> bool:
        host = host_in(url)
        return host in self.hosts or len(self.hosts) < self.crawl.rules.max_hosts

    def _add(self, lead: Lead, below: CrawlEntry) -> bool:
        """Adds a page if it is new. Returns False if there is no room for it."""
        rules, task_id = self.crawl.rules, lead.entry.task_id
        if task_id in self._known or task_id in self.added:
            self.duplicates += 1
        elif not self._admits(lead.url) or not self._allows(lead.url):
            if below.kind is EntryKind.START:
                self.error = (SEED_UNREACHABLE, self._refusal(lead.url))
        elif self.crawl.pages + self.pages >= rules.max_pages:
            self.is_cut_off = True
        elif len(self.added) >= self._room:
            return False
        else:
            self.hosts[host_in(lead.url)] = None
            self.pages += 1
            self.added[task_id] = NewTask(task_id, lead.url, lead.entry)
        return True

    def _allows(self, url: str) -> bool:
        rules = self._robots.get(origin_of(url)) if self.crawl.rules.obeys_robots else None
        return rules is None or rules.allows("/" + url.split("/", 3)[3])

    def _refusal(self, url: str) -> str:
        rules = self._robots.get(origin_of(url))
        if rules is not None and rules.unknown_because:
            return f"robots.txt cannot be read: {rules.unknown_because}."
        return "robots.txt does not allow the start page."

    def _finish(self, source: Source) -> None:
        entry, reading = source.entry, source.reading
        self.done.add(entry.task_id)
        self.fetched += entry.kind is not EntryKind.START
        self.failed += reading is None
        if self.cut[0] == entry.task_id:
            self.cut = (None, 0)
        is_start_page = entry.depth == 0 and entry.kind is EntryKind.PAGE
        if reading is None and is_start_page:
            self.error = (SEED_UNREACHABLE, "The start page could not be fetched.")
            return
        is_kept = entry.kind is EntryKind.PAGE and (reading is None or reading.moved_to is None)
        has_room = self.crawl.items + len(self.items) < self.crawl.rules.max_items
        if is_kept and has_room and self._filter.keeps(source.url):
            self.items.append(entry.task_id)


def new_crawl(job: Job, run: Run, crawl: Crawl) -> Change:
    """Creates the job of a crawl, the crawl, and its first step."""
    start = CrawlEntry(page_id(run.run_id, ""), 0, EntryKind.START)
    step = CrawlStep(crawl.job_id, crawl.run_id, 0, (start,))
    created = admission.new_job(job, run, None, ())
    return Change(
        (
            *created.writes,
            Insert(CrawlKey(crawl.job_id, crawl.run_id), crawl),
            Insert(CrawlStepKey(crawl.job_id, crawl.run_id, 0), step),
        ),
        created.effects,
    )


def step_change(
    plan: StepPlanner,
    job: Job,
    run: Run,
    steps: Sequence[CrawlStep],
    *,
    read_to: int,
    due_at: float,
    now: float,
) -> Change:
    """Builds the change of a planned step. `steps` are successive rows of the log, those of its
    entries among them. No step before `read_to` has entries."""
    crawl = plan.crawl
    entries = tuple(new.entry for new in plan.added.values() if new.entry is not None)
    writes: list[Write] = []
    for step in steps:
        left = tuple(entry for entry in step.waiting if entry.task_id not in plan.done)
        if len(left) < len(step.waiting):
            key = CrawlStepKey(step.job_id, step.run_id, step.number)
            writes.append(Update(key, Guard(), {"waiting": left}, is_quiet=True))
        read_to += step.number == read_to and not left
    is_logged = bool(entries or plan.items)
    if is_logged:
        key = CrawlStepKey(crawl.job_id, crawl.run_id, crawl.steps)
        row = CrawlStep(crawl.job_id, crawl.run_id, crawl.steps, entries, tuple(plan.items))
        writes.append(Insert(key, row))
    values: dict[str, Any] = {
        "due_at": due_at,
        "steps": crawl.steps + is_logged,
        "read_to": read_to,
        "waiting": crawl.waiting - len(plan.done) + len(entries),
        "pages": crawl.pages + plan.pages,
        "fetched": crawl.fetched + plan.fetched,
        "failed": crawl.failed + plan.failed,
        "items": crawl.items + len(plan.items),
        "duplicates": crawl.duplicates + plan.duplicates,
        "hosts": tuple(plan.hosts),
        "cut_task": plan.cut[0],
        "cut_at": plan.cut[1],
        "is_cut_off": plan.is_cut_off,
        "error_code": plan.error[0],
        "error_detail": plan.error[1],
    }
    admitted = _admit(plan, job, run, now) if plan.added else Change(())
    advance = _update(crawl, CrawlEvent.ADVANCED, values, now)
    return Change((advance, *writes, *admitted.writes), admitted.effects)


def _admit(plan: StepPlanner, job: Job, run: Run, now: float) -> Change:
    batch_id = BatchId(f"crawl-{plan.crawl.version}")
    batch = admission.make_batch(run, batch_id, None, total=len(plan.added), now=now)
    tasks = [
        Task(
            run_id=run.run_id,
            task_id=new.task_id,
            shard=shard_of(new.task_id, run.shard_count),
            batch_id=batch_id,
            index=index,
            url=new.url,
            status=TaskStatus.PENDING,
            created_at=now,
            updated_at=now,
            params=_params_of(plan.crawl, new),
        )
        for index, new in enumerate(plan.added.values())
    ]
    return admission.add_batch(job, run, batch, tasks, is_last=False, now=now)


def _params_of(crawl: Crawl, new: NewTask) -> dict[str, str] | None:
    """Only pages are rendered or converted: a robots.txt and a sitemap are read as they are."""
    if new.entry is None:
        return {"allowed_status_codes": ROBOTS_STATUSES}
    return crawl.rules.page_params if new.entry.kind is EntryKind.PAGE else None


def claim(crawl: Crawl, *, due_at: float, now: float) -> Change:
    """Takes a crawl until `due_at`, or makes it due for any worker at `due_at`."""
    return Change((_update(crawl, CrawlEvent.ADVANCED, {"due_at": due_at}, now),))


def find_reached_limit(crawl: Crawl, *, now: float) -> CrawlEnd | None:
    """Returns the limit that ends the crawl although links are left."""
    seconds_max = crawl.rules.max_seconds
    if seconds_max is not None and now >= crawl.created_at + seconds_max:
        return CrawlEnd.MAX_SECONDS
    if crawl.items >= crawl.rules.max_items and (crawl.waiting or crawl.is_cut_off):
        return CrawlEnd.MAX_ITEMS
    return None


def finish(crawl: Crawl, *, ended_by: CrawlEnd | None, now: float) -> Change:
    """Ends a crawl by itself. It stays due until its job is closed and its run has ended."""
    event = CrawlEvent.COMPLETED
    if ended_by is None and crawl.error_code is not None and not crawl.items:
        event = CrawlEvent.FAILED
    if ended_by is None and crawl.is_cut_off:
        ended_by = CrawlEnd.MAX_PAGES
    values = {"ended_by": ended_by, "finished_at": now, "due_at": now}
    return Change((_update(crawl, event, values, now),))


def stop(
    crawl: Crawl, *, ended_by: CrawlEnd | None, error: tuple[str, str] | None, now: float
) -> Change:
    """Ends a crawl for its caller, or because its run has ended."""
    code, detail = error or (None, None)
    values = {
        "ended_by": ended_by,
        "finished_at": now,
        "due_at": now,
        "error_code": code,
        "error_detail": detail,
    }
    return Change((_update(crawl, CrawlEvent.STOPPED, values, now),))


def fail(crawl: Crawl, *, now: float) -> Change:
    """Ends a crawl because of a fault of Conveyor's own."""
    values = {
        "error_code": INTERNAL_ERROR,
        "error_detail": "The log of the server has the cause.",
        "finished_at": now,
        "due_at": now,
    }
    return Change((_update(crawl, CrawlEvent.FAILED, values, now),))


def forget(crawl: Crawl) -> Change:
    """Records that nothing is left to do for an ended crawl."""
    guard = Guard(equals=(("version", crawl.version),))
    key = CrawlKey(crawl.job_id, crawl.run_id)
    return Change((Update(key, guard, {"due_at": None}, {"version": 1}),))


def _update(crawl: Crawl, event: CrawlEvent, values: dict[str, Any], now: float) -> Update:
    guard = Guard(status_in=lifecycle.sources(CRAWL, event), equals=(("version", crawl.version),))
    values = {"status": lifecycle.target(CRAWL, event), "updated_at": now, **values}
    return Update(CrawlKey(crawl.job_id, crawl.run_id), guard, values, {"version": 1})
