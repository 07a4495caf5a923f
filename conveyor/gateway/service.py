"""Service: performs calls within the limits of each key (docs/gateway.md, Answers).

One call is one page. The service decides which way it is fetched, how long it may take, and which
status counts as a page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Protocol

import msgspec
import trio

from conveyor.domain import limits
from conveyor.gateway.browser.rendering import NotRenderable
from conveyor.gateway.call import CALL_S_MAX, Call, bad_parameter
from conveyor.gateway.content import own_support
from conveyor.gateway.errors import CallFailed, Fault, failure_of_content, failure_of_status
from conveyor.gateway.fetch import fetch_plain
from conveyor.gateway.guarding_proxy import Dial
from conveyor.gateway.page import Page
from conveyor.gateway.proxies import Proxy, ProxyPool, Wishes
from conveyor.http_client.pool import HttpPool
from conveyor.ports.gateway import NotScraped, PageProcessor
from conveyor.ports.gateway import Page as JudgedPage

# Proxies that do not work are replaced this often within one attempt.
PROXIES_TRIED_MAX = 3


class Renderer(Protocol):
    async def render(self, call: Call, dial: Dial | None = None) -> Page: ...


class _Way(msgspec.Struct, frozen=True):
    """One way to get a page."""

    renders: bool
    wishes: Wishes


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller gets: `status` and `body`, and where redirects led."""

    status: int
    content_type: str
    body: bytes
    page: Page


class Service:
    """`calls_max` is the number of calls of one key at the same time."""

    def __init__(
        self,
        pool: HttpPool,
        renderer: Renderer | None,
        processor: PageProcessor,
        proxies: ProxyPool,
        *,
        calls_max: int,
        why_no_browser: str = "",
    ) -> None:
        self._pool = pool
        self._processor = processor
        self._proxies = proxies
        #: What calls may ask for.
        self.support = own_support(proxies.honoured)
        self._renderer = renderer
        self._why_no_browser = why_no_browser
        self._calls: Counter[str] = Counter()
        self._scopes: set[trio.CancelScope] = set()
        self._ends_at = inf
        self.calls_max = calls_max

    @property
    def call_count(self) -> int:
        return self._calls.total()

    def remaining(self, partition: str) -> int:
        return max(0, self.calls_max - self._calls[partition])

    def end_calls_at(self, time: float) -> None:
        """Bounds all calls, those under way and later ones: the process is stopping."""
        self._ends_at = time
        for scope in self._scopes:
            scope.deadline = time

    @contextmanager
    def admit(self, partition: str) -> Iterator[None]:
        """Counts a call. Raises CallFailed if the key has no call left, and when the process has no
        more time for the call."""
        if self._calls[partition] >= self.calls_max:
            detail = f"This key has {self.calls_max} calls under way, and may have no more."
            raise CallFailed(Fault.TOO_MANY_CALLS, detail, retry_after_s=1)
        self._calls[partition] += 1
        scope = trio.CancelScope(deadline=self._ends_at)
        self._scopes.add(scope)
        try:
            with scope:
                yield
        finally:
            self._scopes.discard(scope)
            self._calls[partition] -= 1
            if not self._calls[partition]:
                del self._calls[partition]
        if scope.cancelled_caught:
            detail = "the gateway is stopping, and the call took longer than the time that was left"
            raise CallFailed(Fault.UNAVAILABLE, detail, retry_after_s=1)

    async def perform(self, call: Call) -> Answer:
        """Raises CallFailed. A cancelled call ends its page at once."""
        deadline = trio.current_time() + CALL_S_MAX
        with trio.CancelScope(deadline=deadline) as scope:
            return await self._answer(call, deadline)
        assert scope.cancelled_caught
        raise CallFailed(Fault.TOO_SLOW, f"it took more than {CALL_S_MAX:.0f} s")

    async def _answer(self, call: Call, deadline: float) -> Answer:
        *cheaper, last = self._ways(call)
        for way in cheaper:
            try:
                return await self._attempt(call, way, deadline)
            except CallFailed as failure:
                # Another visitor may get the page, but cannot change what a URL is.
                if failure.fault is not Fault.NO_CONTENT:
                    raise
        return await self._attempt(call, last, deadline)

    def _ways(self, call: Call) -> list[_Way]:
        """Returns the ways to get the page, the cheapest first. Raises CallFailed."""
        wishes = _wishes_from(call)
        if wishes.country is not None and not self._proxies.has_any(wishes):
            raise bad_parameter("there is no proxy of this class in this country.")
        if "mode" not in call.params:
            return [_Way(call.rendering is not None, wishes)]
        premium = msgspec.structs.replace(wishes, is_premium=True)
        all_wishes = [wishes, premium] if self._proxies.has_any(premium) else [wishes]
        kinds = [call.rendering is not None]
        if call.tries_plain:
            kinds = [False, True] if self._renderer is not None else [False]
        return [_Way(renders, wishes) for renders in kinds for wishes in all_wishes]

    async def _attempt(self, call: Call, way: _Way, deadline: float) -> Answer:
        """A proxy that turns out not to work is replaced by the next one."""
        host = call.target.host
        for turn in range(1, PROXIES_TRIED_MAX + 1):
            proxy = self._proxies.choose(host, way.wishes)
            try:
                answer = await self._finish(call, await self._fetch(call, way, proxy, deadline))
            except CallFailed as failure:
                if proxy is None or failure.fault is not Fault.NO_CONTENT:
                    raise
                self._proxies.record_refusal(host, proxy)
                if turn == PROXIES_TRIED_MAX or proxy.route.bad_until <= trio.current_time():
                    raise
            else:
                if proxy is not None:
                    self._proxies.record_page(host, proxy)
                return answer
        raise AssertionError("the last turn returns or raises")

    async def _fetch(self, call: Call, way: _Way, proxy: Proxy | None, deadline: float) -> Page:
        pool = self._pool if proxy is None else proxy.route.pool
        if not way.renders:
            return await fetch_plain(pool, call, deadline)
        if self._renderer is None:
            raise bad_parameter(f"js_render needs a browser: {self._why_no_browser}")
        dial = None if proxy is None else partial(proxy.route.dial, partition=call.partition)
        try:
            return await self._renderer.render(call, dial)
        except NotRenderable:
            if call.rendering is not None and call.rendering.has_own_form:
                detail = "the URL is a download, of which a browser shows nothing"
                raise CallFailed(Fault.NOT_EXTRACTED, detail) from None
            # A download has nothing to render.
            return await fetch_plain(pool, call, deadline)

    async def _finish(self, call: Call, page: Page) -> Answer:
        """Judges the page and makes the document that the call wants. Raises CallFailed."""
        is_success = 200 <= page.status < 300 or page.status in call.allowed
        keeps_status = call.keeps_status or page.status in call.allowed
        if not is_success and not call.keeps_status:
            raise failure_of_status(page.status)
        body, content_type = page.body, page.content_type
        if is_success:
            outcome = await self._processor.process(
                call.params,
                _judged_page(page),
                bytes_max=limits.BODY_BYTES_MAX,
                deadline_s=CALL_S_MAX,
            )
            if isinstance(outcome, NotScraped):
                raise failure_of_content(outcome)
            if page.html is None:
                body, content_type = outcome.body, outcome.content_type
        if call.rendering is not None and call.rendering.is_json and page.report is not None:
            body, content_type = _json_of(page), "application/json"
        return Answer(
            status=page.status if keeps_status else 200,
            content_type=content_type,
            body=body,
            page=page,
        )


def _wishes_from(call: Call) -> Wishes:
    session = call.params.get("session_id")
    return Wishes(
        is_premium=call.params.get("premium_proxy", "").lower() in {"true", "1"},
        country=call.params.get("proxy_country", "").lower() or None,
        # Two callers with the same number have nothing in common.
        session=f"{call.partition}/{session}" if session else None,
    )


def _judged_page(page: Page) -> JudgedPage:
    """A picture of a page is judged by the page. What a browser makes of an answer is HTML, and
    is judged as what the site sent."""
    return JudgedPage(
        url=page.url,
        status=page.status,
        headers=dict(page.site_headers),
        content_type=page.content_type if page.html is None else "text/html; charset=utf-8",
        body=page.body if page.html is None else page.html,
        is_rendered=page.report is not None,
    )


def _json_of(page: Page) -> bytes:
    assert page.report is not None
    document: dict[str, object] = {
        "html": page.body.decode(errors="replace"),
        "xhr": page.report.xhr,
    }
    if page.report.instructions is not None:
        document["js_instructions_report"] = page.report.instructions
    if page.report.screenshot is not None:
        document["screenshot"] = page.report.screenshot
    return msgspec.json.encode(document)
