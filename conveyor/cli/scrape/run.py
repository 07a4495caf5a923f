"""Runs a scrape from the list to the final screen (docs/scrape.md)."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING, Protocol

import click
import msgspec
import trio

from conveyor.bootstrap.local_gateway import LocalGateway
from conveyor.bootstrap.scrape import DIRECT, open_scrape_gateway
from conveyor.cli.scrape.budget import SpendingLimit
from conveyor.cli.scrape.display import (
    DRAW_S,
    RED,
    Display,
    Meter,
    see,
    size,
    summary_lines,
)
from conveyor.cli.scrape.fetcher import Fetcher, job_params
from conveyor.cli.scrape.folder import (
    FORMAT_VERSION,
    LIST_NAME,
    Folder,
    FolderRefused,
    FolderState,
    boot_id,
    changed_fixed_options,
)
from conveyor.cli.scrape.helpers import Helper, HelperSide, fork_helper
from conveyor.cli.scrape.inputs import PageList, find_duplicates, hosts_of
from conveyor.cli.scrape.options import PageFormat, ScrapeOptions
from conveyor.cli.scrape.page_writer import Format, PageWriter, make_namer, open_format
from conveyor.cli.scrape.pages import (
    Answer,
    Page,
    PageStatus,
    ResultLine,
    fingerprint,
    request_key,
)
from conveyor.cli.scrape.scraper import ROBOTS_DISALLOWED, Ending, Progress, Scraper, Sites
from conveyor.config import Settings
from conveyor.domain.budget import BudgetCap
from conveyor.domain.submit.scraper_params import needs_browser
from conveyor.ports.gateway import Gateway

if TYPE_CHECKING:
    from conveyor.process_status import Snapshot

EXIT_SOME_FAILED = 1
EXIT_INTERRUPTED = 130
# An interrupted command ends within this time, in order or not.
INTERRUPTED_S = 2
# A shorter list is finished before another process is of use.
LONG_LIST = 2_000
# The default for many cores. A larger number is possible with --processes.
PROCESSES_MAX = 4
FAILURES_SHOWN = 10


class Summary(msgspec.Struct, frozen=True):
    """The last line of the output with --json."""

    total: int
    successful: int
    failed: int
    invalid: int
    fetched: int
    bytes: int
    seconds: float
    folder: str


@dataclass(slots=True)
class Rounds:
    """What the rounds of a crawl share: what they have learned of the sites, the pages that they
    have fetched, and the rates that the display shows."""

    sites: Sites = field(default_factory=Sites)
    fetched: int = 0
    meter: Meter | None = None
    has_begun: bool = False
    had_pages: bool = False  #: A round had a page to fetch.


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the command line asks for. `given_options` names the options that were given. A round
    of a crawl shows no result, because another one may follow."""

    settings: Settings
    folder: Path
    options: ScrapeOptions
    source: str = ""
    page_list: PageList | None = None
    command: str = "conveyor scrape"
    given_options: frozenset[str] = frozenset()
    data_dir: Path | None = None
    processes: int | None = None
    api_key: str | None = None
    budget: BudgetCap | None = None
    retries_failed: bool = False
    restarts: bool = False
    updates: bool = False
    is_round: bool = False
    rounds: Rounds = field(default_factory=Rounds)
    as_json: bool = False


@dataclass(slots=True)
class Plan:
    """The pages of a folder that the scrape has yet to fetch."""

    pages: list[Page]
    hosts: list[str]
    options: ScrapeOptions
    pending: list[int] = field(default_factory=list)
    earlier: list[ResultLine] = field(default_factory=list)
    invalid: int = 0
    duplicates: int = 0
    end: int = 0
    is_resumed: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """The exit code, and the pages that failed."""

    code: int
    failed: int


def run_order(order: Order, display: Display, started_at: float) -> Ended:
    """Runs the scrape and shows the result."""
    folder = Folder(order.folder, order.data_dir)
    folder.open(drops_state=order.restarts and order.page_list is not None)
    try:
        if not order.rounds.has_begun:
            display.phase("Looking at what is there")
        plan = prepare(folder, order)
        scraper = _scraper(folder, plan, order)
        if plan.pending:
            order.rounds.had_pages = True
            if plan.is_resumed and not order.rounds.has_begun:
                left = f"{len(plan.pending):,} of {len(plan.pages):,} pages left"
                display.say(f"Going on with this list where it stopped: {left}.")
            _fetch(folder, plan, scraper, order, display)
        order.rounds.has_begun, order.rounds.fetched = True, scraper.progress.fetched
        if scraper.ending is None:
            if not order.is_round:
                display.phase(f"Writing {LIST_NAME}")
            folder.finish()
        if order.is_round and scraper.ending is None:
            return Ended(0, scraper.progress.failed)
        display.clear()
        code = report(folder, plan, scraper, order, display, time.monotonic() - started_at)
        return Ended(code, scraper.progress.failed)
    finally:
        folder.close()


# The pages that are left to fetch.


def prepare(folder: Folder, order: Order) -> Plan:
    """Compares the list and the options with those of the folder. Raises FolderRefused."""
    if order.restarts and (order.page_list is not None or folder.state is not None):
        folder.clear(keeps_list=order.page_list is None)
    state = folder.state
    plan = _new_list(folder, order) if state is None else _known_list(folder, state, order)
    state = folder.state
    assert state is not None
    here = boot_id()
    lines = folder.open_results(checks_digests=not here or here != state.boot_id)
    done = bytearray(len(plan.pages))
    for line in lines:
        if order.retries_failed and line.status == PageStatus.FAILED:
            continue
        done[line.index] = 1
        plan.earlier.append(line)
        plan.end = max(plan.end, (line.offset or 0) + (line.length or 0))
    if here != state.boot_id:
        folder.save_state(msgspec.structs.replace(state, boot_id=here))
    repeated = find_duplicates(plan.pages) if plan.options.dedup else {}
    _settle_unfetchable(folder, plan, done, repeated)
    plan.pending = [index for index in range(len(plan.pages)) if not done[index]]
    plan.is_resumed = bool(plan.pending) and len(plan.pending) < len(plan.pages) - len(repeated)
    plan.is_resumed = plan.is_resumed and bool(plan.earlier)
    return plan


def _new_list(folder: Folder, order: Order) -> Plan:
    if order.page_list is None:
        raise FolderRefused(f"{folder.path} has no list yet. Give a FILE or URLs.")
    if (folder.path / LIST_NAME).exists():
        raise FolderRefused(
            f"{folder.path}/{LIST_NAME} is there, and not of a list that can be resumed. Give "
            "another folder with -o, or replace its pages with --restart."
        )
    pages, hosts = order.page_list.pages, order.page_list.hosts
    state = FolderState(
        FORMAT_VERSION,
        str(folder.path.resolve()),
        order.source,
        [fingerprint(pages)],
        order.options,
        boot_id(),
    )
    folder.begin(pages, state)
    return Plan(pages, hosts, order.options)


def _known_list(folder: Folder, state: FolderState, order: Order) -> Plan:
    options = _merged(state.options, order)
    changed = changed_fixed_options(state.options, options)
    if changed and not order.restarts:
        names = ", ".join(f"--{name}" for name in changed)
        raise FolderRefused(
            f"{names} cannot change for a folder that has pages. Give another folder with -o, or "
            "start over with --restart."
        )
    page_list = order.page_list
    is_known = page_list is None or fingerprint(page_list.pages) in state.lists
    if not is_known and not order.updates:
        raise FolderRefused(
            f"{folder.path} belongs to another list ({state.source}). Give another folder with -o, "
            "fetch only the new URLs with --update, or replace its pages with --restart."
        )
    if page_list is not None and is_known and len(state.lists) == 1:
        pages, hosts = page_list.pages, page_list.hosts
    else:
        pages = folder.load_pages()
        hosts = hosts_of(pages)
    folder.pages = pages
    if page_list is not None and not is_known:
        known = {request_key(page) for page in pages}
        for page, host in zip(page_list.pages, page_list.hosts, strict=True):
            if request_key(page) not in known:
                pages.append(page)
                hosts.append(host)
        state = msgspec.structs.replace(state, lists=[*state.lists, fingerprint(page_list.pages)])
        folder.begin(pages, msgspec.structs.replace(state, options=options))
    elif options != state.options:
        folder.save_state(msgspec.structs.replace(state, options=options))
    return Plan(pages, hosts, options)


def _merged(remembered: ScrapeOptions, order: Order) -> ScrapeOptions:
    """Returns the remembered options with those that were given now."""
    values = {name: getattr(order.options, name) for name in order.given_options}
    return msgspec.structs.replace(remembered, **values)


def _settle_unfetchable(
    folder: Folder, plan: Plan, done: bytearray, repeated: dict[int, int]
) -> None:
    """Writes the lines of pages that are not fetched: invalid lines and repeated requests."""
    lines: list[ResultLine] = []
    for index, page in enumerate(plan.pages):
        if page.flaw is not None:
            plan.invalid += 1
            error, _, detail = page.flaw.partition(": ")
            where = f"line {page.line}" + (f": {detail}" if detail else "")
            line = ResultLine(
                index, page.url, PageStatus.INVALID, id=page.id, error=error, detail=where
            )
        elif index in repeated:
            plan.duplicates += 1
            detail = f"the same request as index {repeated[index]}"
            line = ResultLine(index, page.url, PageStatus.DUPLICATE, id=page.id, detail=detail)
        else:
            continue
        if not done[index]:
            done[index] = 1
            lines.append(line)
    if lines:
        folder.append(lines)


# Fetching.


def _scraper(folder: Folder, plan: Plan, order: Order) -> Scraper:
    scraper = Scraper(folder, plan.pages, plan.hosts, plan.options, order.rounds.sites)
    scraper.progress.total -= plan.invalid + plan.duplicates
    scraper.progress.fetched = order.rounds.fetched
    for line in plan.earlier:
        scraper.count(line)
    plan.earlier.clear()
    return scraper


def useful_processes(count: int, options: ScrapeOptions) -> int:
    """Returns one process per core, up to PROCESSES_MAX, or one process for a short list."""
    if count < LONG_LIST or options.format is not PageFormat.FILES or options.rate is not None:
        return 1
    return min(os.cpu_count() or 1, PROCESSES_MAX)


class PageSource(Protocol):
    """Where a process gets its pages from, and who gets the answers."""

    async def next_page(self) -> int | None: ...

    def settle(self, answers: Sequence[Answer]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Worker:
    """What each process needs to fetch pages."""

    order: Order
    plan: Plan
    folder: Folder
    slots: int
    local: LocalGateway | None

    @contextmanager
    def gateway(self) -> Iterator[Gateway]:
        options = self.plan.options
        with open_scrape_gateway(
            self.order.settings,
            now=time.time,
            slots=self.slots,
            timeout_s=options.timeout_s,
            proxies=options.proxies,
            is_insecure=options.is_insecure,
        ) as gateway:
            yield gateway

    def page_format(self) -> Format:
        options, folder = self.plan.options, self.folder
        namer = make_namer(options.name)
        return open_format(options.format, folder.path, folder.scratch, namer, self.plan.end)

    async def help(self, side: HelperSide) -> None:
        """The life of a helper process."""
        with self.gateway() as gateway:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(side.send)
                fetcher = self.start_writer(nursery, gateway, side)
                self.start_fetches(nursery, fetcher, side)
                await side.receive()
                nursery.cancel_scope.cancel()

    def start_writer(self, nursery: trio.Nursery, gateway: Gateway, source: PageSource) -> Fetcher:
        plan = self.plan
        writer = PageWriter(self.folder.path, plan.pages, self.page_format(), source.settle)
        nursery.start_soon(writer.run)
        return Fetcher(
            gateway,
            plan.pages,
            plan.options,
            writer,
            source.settle,
            api_key=self.order.api_key,
            is_direct=self.order.settings.gateway_url == DIRECT,
        )

    def start_fetches(self, nursery: trio.Nursery, fetcher: Fetcher, source: PageSource) -> None:
        async def fetch_pages() -> None:
            while (index := await source.next_page()) is not None:
                await fetcher.fetch(index)

        for _ in range(self.slots):
            nursery.start_soon(fetch_pages)


class MonotonicClock(trio.abc.Clock):
    """The clock of every round of a crawl: unlike Trio's own, it goes on from one event loop to the
    next, and so do the pauses of the sites."""

    def start_clock(self) -> None:
        pass

    def current_time(self) -> float:
        return time.monotonic()

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return deadline - self.current_time()


def _fetch(folder: Folder, plan: Plan, scraper: Scraper, order: Order, display: Display) -> None:
    count = order.processes or useful_processes(len(plan.pending), plan.options)
    slots = -(-min(plan.options.concurrency, len(plan.pending)) // count)
    # Before the helpers are forked: they use the same renderer.
    local = None
    if any(needs_browser({**plan.options.params, **(page.params or {})}) for page in plan.pages):
        local = LocalGateway.prepare(order.settings, SystemRandom())
    if local is not None:
        order = replace(order, settings=local.settings)
    worker = _Worker(order, plan, folder, slots, local)
    # Rows and answers are freed by reference counts; the modules stay for ever.
    gc.freeze()
    gc.set_threshold(50_000, 20, 10)
    helpers = [fork_helper(worker.help) for _ in range(count - 1)]
    try:
        trio.run(_fetch_all, worker, scraper, helpers, display, clock=MonotonicClock())
    finally:
        for helper in helpers:
            helper.stop()
        if local is not None:
            local.listener.close()


async def _fetch_all(
    worker: _Worker, scraper: Scraper, helpers: Sequence[Helper], display: Display
) -> None:
    plan, order = worker.plan, worker.order
    with trio.CancelScope() as scope, worker.gateway() as gateway:
        if order.budget is not None:
            scraper.budget = _spending_limit(worker, gateway, order.budget)
        # A remote gateway would charge for robots.txt, and this machine may not reach the site.
        scraper.asks_robots = not (
            plan.options.ignores_robots or order.settings.gateway_url != DIRECT
        )
        scraper.add(plan.pending)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_interrupt_on_signal, scraper, scope)
            nursery.start_soon(_show, scraper, plan, order.rounds, display)
            nursery.start_soon(_serve_snapshots, worker, scraper)
            if worker.local is not None:
                nursery.start_soon(worker.local.run)
            await nursery.start(scraper.run, gateway)
            fetcher = worker.start_writer(nursery, gateway, scraper)
            async with trio.open_nursery() as fetches:
                worker.start_fetches(fetches, fetcher, scraper)
                for helper in helpers:
                    fetches.start_soon(helper.run, scraper, worker.slots)
            nursery.cancel_scope.cancel()
    if scraper.budget is not None:
        scraper.budget.close()


def _spending_limit(worker: _Worker, gateway: Gateway, cap: BudgetCap) -> SpendingLimit:
    folder = worker.folder

    def save(spent_max: int) -> None:
        assert folder.state is not None
        folder.save_state(msgspec.structs.replace(folder.state, spent_max=spent_max))

    assert folder.state is not None
    params = job_params(worker.plan.options)
    return SpendingLimit(cap, gateway.price, params, folder.state.spent_max, save)


async def _interrupt_on_signal(scraper: Scraper, scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            if scraper.ending is Ending.INTERRUPTED:
                os._exit(EXIT_INTERRUPTED)
            scraper.ending = Ending.INTERRUPTED
            signal.signal(signal.SIGALRM, _exit_interrupted)
            signal.alarm(INTERRUPTED_S)
            scope.cancel()


def _exit_interrupted(*_: object) -> None:
    os._exit(EXIT_INTERRUPTED)


async def _show(scraper: Scraper, plan: Plan, rounds: Rounds, display: Display) -> None:
    progress = scraper.progress
    meter = rounds.meter
    if meter is None:
        meter = rounds.meter = Meter(trio.current_time(), progress.done, progress.size_bytes)
    while True:
        now = trio.current_time()
        display.update(see(scraper, meter, now, lambda index: plan.pages[index].url))
        await trio.sleep(DRAW_S)


async def _serve_snapshots(worker: _Worker, scraper: Scraper) -> None:
    """Serves `conveyor ps`. A list that takes a second needs no such thing, and its import."""
    await trio.sleep(1.0)
    from conveyor.cli.scrape.snapshot import snapshot_of
    from conveyor.process_status import serve_snapshots

    started_at = trio.current_time() - 1.0

    async def take() -> Snapshot:
        return snapshot_of(scraper, worker.folder.path, worker.slots, started_at)

    # Some file systems have no sockets. The scrape does not need one.
    with suppress(OSError):
        await serve_snapshots(worker.folder.data_dir, take)


# The final screen.


def report(
    folder: Folder, plan: Plan, scraper: Scraper, order: Order, display: Display, seconds: float
) -> int:
    progress = scraper.progress
    if order.as_json and scraper.ending is not Ending.INTERRUPTED:
        summary = Summary(
            progress.total,
            progress.successful,
            progress.failed,
            plan.invalid,
            progress.fetched,
            progress.size_bytes,
            round(seconds, 3),
            str(folder.path),
        )
        click.echo(msgspec.json.encode(summary).decode())
    done = f"{progress.done:,} of {progress.total:,} pages done"
    match scraper.ending:
        case Ending.INTERRUPTED:
            display.say(f"Interrupted with {done}. The same command goes on from there.")
            return EXIT_INTERRUPTED
        case Ending.BROKE:
            display.say(f"The budget is spent with {done}.")
            display.say("The same command with a larger --budget goes on from there.")
        case Ending.REFUSED:
            display.say(f"The gateway refuses the account: {scraper.ending_detail}.")
            display.say(f"It stopped with {done}. The same command goes on from there.")
        case None if not order.rounds.had_pages:
            size_text = size(progress.size_bytes)
            display.say(f"This list is done: nothing was left to fetch ({size_text} here).")
    for line in summary_lines(progress, seconds, invalid=plan.invalid, duplicates=plan.duplicates):
        display.say(line)
    if progress.failed:
        _show_failures(folder, progress, order, display)
    display.say(f"Pages and {LIST_NAME} are in {folder.path}/")
    return EXIT_SOME_FAILED if progress.failed or scraper.ending is not None else 0


def _show_failures(folder: Folder, progress: Progress, order: Order, display: Display) -> None:
    count = progress.failed
    lines = folder.lines_of(lambda line: line.status == PageStatus.FAILED, FAILURES_SHOWN)
    for line in lines:
        display.say_cut(RED, f"  {line.error}  {line.url}  ({line.detail})")
    if count > len(lines):
        display.say(f"  ... and {count - len(lines):,} more in {LIST_NAME}")
    if progress.failures.keys() == {ROBOTS_DISALLOWED}:
        display.say(f"Ask no robots.txt: {order.command} --retry-failed --ignore-robots")
    else:
        display.say(f"Retry them: {order.command} --retry-failed")
