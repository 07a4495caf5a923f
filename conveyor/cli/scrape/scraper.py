"""Scraper: decides which page is fetched next, and what becomes of each answer.

One process decides. It fetches pages itself and sends others to helper processes, which write their
pages themselves and send back the answers. Only this process writes results.jsonl.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import trio

from conveyor.cli.scrape.budget import SpendingLimit
from conveyor.cli.scrape.fetcher import robots_request
from conveyor.cli.scrape.folder import Folder
from conveyor.cli.scrape.hosts import PAUSE_S_MAX, PER_HOST, Host, Hosts, is_private_host
from conveyor.cli.scrape.options import ScrapeOptions
from conveyor.cli.scrape.pages import Answer, Page, PageStatus, ResultLine
from conveyor.domain.crawl.robots import RobotsRules, is_without_rules, rules_in
from conveyor.domain.model import FailureReason
from conveyor.domain.run.settlement import retry_delay_s
from conveyor.domain.submit.target import Target, parse_url
from conveyor.ports.gateway import Gateway, NotScraped, Scraped

# A site that asks for fewer requests is not a failed attempt, but this often it is.
THROTTLED_MAX = 10
DEFERRED_S = 1.0
ROBOTS_ATTEMPTS = 3
ROBOTS_RETRY_S = 1.0
ROBOTS_DISALLOWED = "robots_disallowed"
ROBOTS_UNREACHABLE = "robots_unreachable"
# Nothing of such a site can be fetched: this says more than that its robots.txt cannot be.
_NO_SITE = frozenset({"connect_failed", "dns_failed", "forbidden_target", "tls_failed"})
# A page that ended so many processes is not tried again.
LOST_MAX = 3


class Ending(Enum):
    """Why a scrape ended before its list did."""

    INTERRUPTED = "interrupted"
    BROKE = "the budget is spent"
    REFUSED = "the gateway refuses the account"


class Progress:
    """What the display shows. Counts of pages include those of earlier commands, except `fetched`:
    the pages of this command that a site was asked for."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.successful = 0
        self.failures: Counter[str] = Counter()
        self.size_bytes = 0
        self.fetched = 0
        self.inflight: dict[int, float] = {}

    @property
    def failed(self) -> int:
        return self.failures.total()

    @property
    def done(self) -> int:
        return self.successful + self.failed


@dataclass(frozen=True, slots=True)
class UnknownRules:
    """Why a robots.txt cannot be known, as the error of every page of the site."""

    error: str
    detail: str


@dataclass(slots=True)
class Sites:
    """What a scrape has learned of the sites: their pace and pauses, and their robots.txt."""

    hosts: dict[str, Host] = field(default_factory=dict)
    rules: dict[tuple[str, str, int], RobotsRules | UnknownRules] = field(default_factory=dict)


class Scraper:
    """`sites` is what earlier rounds of the same crawl have learned."""

    def __init__(
        self,
        folder: Folder,
        pages: Sequence[Page],
        host_names: Sequence[str],
        options: ScrapeOptions,
        sites: Sites | None = None,
    ) -> None:
        self._folder = folder
        self._pages = pages
        self._options = options
        self.budget: SpendingLimit | None = None
        self._random = random.SystemRandom()
        self._attempts: Counter[int] = Counter()
        self._throttled: Counter[int] = Counter()
        self._lost: Counter[int] = Counter()
        sites = sites or Sites()
        self._robots = sites.rules
        self._left = 0
        self._slots_max: int | None = None
        self._parked = trio.lowlevel.ParkingLot()
        self._changed = trio.Event()
        self.hosts = Hosts(host_names, self._new_host, sites.hosts)
        self.progress = Progress(len(pages))
        self.asks_robots = True
        self.ending: Ending | None = None
        self.ending_detail = ""

    def _new_host(self, name: str) -> Host:
        options = self._options
        limit = options.per_host
        if limit is None and not is_private_host(name):
            limit = PER_HOST
        return Host(name, limit, 1.0 / options.rate if options.rate else 0.0)

    # The queue.

    def add(self, indices: Sequence[int]) -> None:
        """Adds pages before the start."""
        for index in indices:
            self.hosts.add(index, 0.0)
        self._left += len(indices)

    @property
    def is_over(self) -> bool:
        return self._left == 0 or (self.ending is not None and not self.progress.inflight)

    async def next_page(self) -> int | None:
        """Waits for a page that may begin; None if there will be none."""
        while not self.is_over:
            index = self.take()
            if index is not None:
                self.wake_next()
                return index
            await self.wait_changed()
        return None

    async def wait_changed(self) -> None:
        """Waits until `take` may return another page."""
        if self.is_over:  # `take` may have ended the last pages itself.
            return
        # `run` may not know the time to wake at: it was not told while nobody waited.
        self._changed.set()
        await self._parked.park()

    def wake_next(self) -> None:
        """Called by a task that has taken pages: another one may take more."""
        if self._parked and self.hosts.has_ready:
            self._parked.unpark()

    def take(self) -> int | None:
        """Returns a page that may begin now, or None."""
        now = trio.current_time()
        inflight = self.progress.inflight
        while self.ending is None:
            if self._slots_max is not None and len(inflight) >= self._slots_max:
                return None
            index = self.hosts.take(now)
            if index is None:
                return None
            if not self._may_fetch(index, now):
                continue
            if self.budget is not None and not self.budget.reserve(self._pages[index]):
                self.hosts.end(index, now)
                self.hosts.add(index, now)
                if not inflight:
                    self._end(Ending.BROKE)
                return None
            inflight[index] = now
            return index
        return None

    def _may_fetch(self, index: int, now: float) -> bool:
        """Checks robots.txt. Without its rules the host waits until they are fetched."""
        if not self.asks_robots:
            return True
        target = parse_url(self._pages[index].url)
        assert isinstance(target, Target)
        rules = self._robots.get(target.origin)
        if rules is None:
            self.hosts.put_back(index)
            host = self.hosts.host(index)
            self._nursery.start_soon(self._learn_rules, self._robots_gateway, target, host)
            return False
        if isinstance(rules, RobotsRules):
            if rules.allows(target.path_and_query):
                return True
            error, detail = ROBOTS_DISALLOWED, "robots.txt forbids this page (--ignore-robots)"
        else:
            error, detail = rules.error, rules.detail
        self.hosts.forgo(index, now)
        answer = Answer(index, 0.0, error=error, detail=detail)
        self._finish([self._failed_line(answer)])
        return False

    # The answers.

    def settle(self, answers: Sequence[Answer]) -> None:
        """Ends the pages whose answers are final, and puts the others back."""
        now = trio.current_time()
        lines: list[ResultLine] = []
        for answer in answers:
            self.progress.inflight.pop(answer.index, None)
            line = self._settle_one(answer, now)
            if line is not None:
                lines.append(line)
            # After the decision: it may have paused the host.
            self.hosts.end(answer.index, now)
        self.progress.fetched += len(lines)
        if lines:
            self._finish(lines)
        self._wake(len(answers))

    def _settle_one(self, answer: Answer, now: float) -> ResultLine | None:
        index = answer.index
        if self.budget is not None:
            self.budget.spend(self._pages[index], answer)
        if answer.gateway_limit is not None:
            self._slots_max = max(1, answer.gateway_limit)
        if answer.file is not None:
            self.hosts.succeed(self.hosts.host(index), answer.seconds)
            return self._successful_line(answer)
        if answer.run_failure is not None:
            self._end(Ending.REFUSED, answer.detail or answer.run_failure)
            self.hosts.add_later(index, now)
            return None
        if answer.is_deferred:
            delay_s = answer.retry_after_s or DEFERRED_S
            self.hosts.paused_until = max(self.hosts.paused_until, now + delay_s)
            self.hosts.add_later(index, now + delay_s)
            return None
        if answer.is_throttled and self._slow_down(answer, now):
            return None
        self._attempts[index] += 1
        if not answer.is_retryable or self._attempts[index] >= self._options.attempts:
            return self._failed_line(answer)
        delay_s = retry_delay_s(
            FailureReason(answer.reason or FailureReason.OTHER),
            attempt=self._attempts[index],
            retry_after_s=answer.retry_after_s,
            random=self._random,
        )
        self.hosts.add_later(index, now + delay_s)
        return None

    def _slow_down(self, answer: Answer, now: float) -> bool:
        """Slows the host down. Returns whether the page waits without a counted attempt."""
        index, host = answer.index, self.hosts.host(answer.index)
        is_explicit = answer.http_status == 429 or answer.retry_after_s is not None
        is_slowed = self.hosts.throttle(
            host, now, retry_after_s=answer.retry_after_s, is_explicit=is_explicit
        )
        self._throttled[index] += 1
        if not is_slowed or self._throttled[index] > THROTTLED_MAX:
            return False
        self.hosts.add_later(index, host.paused_until)
        return True

    def lose(self, indices: Sequence[int]) -> None:
        """Puts back the pages of a helper process that is gone."""
        now = trio.current_time()
        lines: list[ResultLine] = []
        for index in indices:
            self.progress.inflight.pop(index, None)
            self.hosts.end(index, now)
            self._lost[index] += 1
            if self._lost[index] < LOST_MAX:
                self.hosts.add(index, now)
            else:
                detail = "the process that fetched this page ended each time"
                lines.append(
                    self._failed_line(Answer(index, 0.0, error="worker_crashed", detail=detail))
                )
        self.progress.fetched += len(lines)
        if lines:
            self._finish(lines)
        self._wake(len(indices))

    def _finish(self, lines: Sequence[ResultLine]) -> None:
        self._folder.append(lines)
        self._left -= len(lines)
        for line in lines:
            self.count(line)
        if self.is_over:
            self._parked.unpark_all()

    def count(self, line: ResultLine) -> None:
        """Counts a line, of this command or an earlier one."""
        if line.status == PageStatus.SUCCESSFUL:
            self.progress.successful += 1
            self.progress.size_bytes += line.bytes or 0
        elif line.status == PageStatus.FAILED:
            self.progress.failures[line.error or "other"] += 1

    def _successful_line(self, answer: Answer) -> ResultLine:
        page = self._pages[answer.index]
        return ResultLine(
            answer.index,
            page.url,
            PageStatus.SUCCESSFUL,
            id=page.id,
            file=answer.file,
            offset=answer.offset,
            length=answer.length,
            http_status=answer.http_status,
            final_url=answer.final_url or page.url,
            content_type=answer.content_type,
            bytes=answer.size_bytes,
            sha256=answer.sha256,
            seconds=answer.seconds,
            attempts=self._attempts[answer.index] + 1,
        )

    def _failed_line(self, answer: Answer) -> ResultLine:
        page = self._pages[answer.index]
        return ResultLine(
            answer.index,
            page.url,
            PageStatus.FAILED,
            id=page.id,
            http_status=answer.http_status,
            seconds=answer.seconds,
            attempts=self._attempts[answer.index],
            error=answer.error,
            detail=answer.detail,
        )

    def _end(self, ending: Ending, detail: str = "") -> None:
        if self.ending is None:
            self.ending, self.ending_detail = ending, detail
        self._wake(0)

    def _wake(self, count: int) -> None:
        if self.is_over or self.ending is not None:
            self._parked.unpark_all()
        elif self._parked:
            self._parked.unpark(count=max(1, count))
            # There may be a new time to wake them at.
            self._changed.set()

    # Tasks of its own.

    async def run(
        self,
        robots_gateway: Gateway,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Wakes the workers when the time of a host or a page has come, until it is cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery, self._robots_gateway = nursery, robots_gateway
            task_status.started()
            while True:
                now = trio.current_time()
                if self.hosts.release(now) and self._parked:
                    self._parked.unpark()
                at = self.hosts.wake_at(now)
                self._changed = trio.Event()
                with trio.CancelScope(deadline=math.inf if at is None else at):
                    await self._changed.wait()

    async def _learn_rules(self, gateway: Gateway, target: Target, host: Host) -> None:
        self._robots[target.origin] = rules = await self._fetch_rules(gateway, target)
        if isinstance(rules, RobotsRules):
            host.interval_s = max(host.interval_s, rules.crawl_delay_s)
        self.hosts.unblock(host, trio.current_time())
        self._wake(self._options.concurrency)

    async def _fetch_rules(self, gateway: Gateway, target: Target) -> RobotsRules | UnknownRules:
        """Returns the rules, or why they cannot be known. A site without the file allows all."""
        url = f"{target.scheme}://{target.authority}/robots.txt"
        unknown = UnknownRules(ROBOTS_UNREACHABLE, "")
        asked_s = 0.0
        for attempt in range(ROBOTS_ATTEMPTS):
            if attempt:
                await trio.sleep(max(ROBOTS_RETRY_S * 2.0 ** (attempt - 1), asked_s))
            outcome = await gateway.scrape(robots_request(url, self._options))
            if isinstance(outcome, Scraped):
                return rules_in(outcome.body)
            asked_s = min(outcome.retry_after_s or 0.0, PAUSE_S_MAX)
            if not isinstance(outcome, NotScraped):
                unknown = UnknownRules(ROBOTS_UNREACHABLE, outcome.detail)
                continue
            if is_without_rules(outcome.problem.code, outcome.problem.status):
                return RobotsRules()
            unknown = _unknown_from(outcome)
            if not outcome.retryable:
                break
        return unknown


def _unknown_from(outcome: NotScraped) -> UnknownRules:
    code, detail = outcome.problem.code, outcome.problem.detail or outcome.problem.title
    if code in _NO_SITE:
        return UnknownRules(code, detail)
    return UnknownRules(ROBOTS_UNREACHABLE, f"robots.txt cannot be read: {code}: {detail}")
