"""Service: performs calls within the limits of each key (docs/gateway.md, Answers).

One call is one page. The service decides which way it is fetched, how long it may take, and which
status counts as a page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec
import trio

from conveyor.domain import limits
from conveyor.gateway.browser.rendering import NotRenderable
from conveyor.gateway.call import CALL_S_MAX, Call, bad_parameter
from conveyor.gateway.errors import CallFailed, Fault, failure_of_content, failure_of_status
from conveyor.gateway.fetch import fetch_plain
from conveyor.gateway.page import Page
from conveyor.http_client.pool import HttpPool
from conveyor.ports.gateway import NotScraped, PageProcessor
from conveyor.ports.gateway import Page as JudgedPage


class Renderer(Protocol):
    async def render(self, call: Call) -> Page: ...


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
        *,
        calls_max: int,
        why_no_browser: str = "",
    ) -> None:
        self._pool = pool
        self._processor = processor
        self._renderer = renderer
        self._why_no_browser = why_no_browser
        self._calls: Counter[str] = Counter()
        self.calls_max = calls_max

    @property
    def call_count(self) -> int:
        return self._calls.total()

    def remaining(self, partition: str) -> int:
        return max(0, self.calls_max - self._calls[partition])

    @contextmanager
    def admit(self, partition: str) -> Iterator[None]:
        """Counts a call. Raises CallFailed if the key has no call left."""
        if self._calls[partition] >= self.calls_max:
            detail = f"This key has {self.calls_max} calls under way, and may have no more."
            raise CallFailed(Fault.TOO_MANY_CALLS, detail, retry_after_s=1)
        self._calls[partition] += 1
        try:
            yield
        finally:
            self._calls[partition] -= 1
            if not self._calls[partition]:
                del self._calls[partition]

    async def perform(self, call: Call) -> Answer:
        """Raises CallFailed. A cancelled call ends its page at once."""
        deadline = trio.current_time() + CALL_S_MAX
        with trio.CancelScope(deadline=deadline) as scope:
            return await self._answer(call, deadline)
        assert scope.cancelled_caught
        raise CallFailed(Fault.TOO_SLOW, f"it took more than {CALL_S_MAX:.0f} s")

    async def _answer(self, call: Call, deadline: float) -> Answer:
        if call.tries_plain:
            try:
                return await self._finish(call, await fetch_plain(self._pool, call, deadline))
            except CallFailed as failure:
                # A browser is another visitor, but it cannot change what a URL is.
                if failure.fault is not Fault.NO_CONTENT or self._renderer is None:
                    raise
        return await self._finish(call, await self._fetch(call, deadline))

    async def _fetch(self, call: Call, deadline: float) -> Page:
        if call.rendering is None:
            return await fetch_plain(self._pool, call, deadline)
        if self._renderer is None:
            raise bad_parameter(f"js_render needs a browser: {self._why_no_browser}")
        try:
            return await self._renderer.render(call)
        except NotRenderable:
            # A download has nothing to render.
            return await fetch_plain(self._pool, call, deadline)

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
            body, content_type = outcome.body, outcome.content_type
        if call.rendering is not None and call.rendering.is_json and page.report is not None:
            body, content_type = _json_of(page), "application/json"
        return Answer(
            status=page.status if keeps_status else 200,
            content_type=content_type,
            body=body,
            page=page,
        )


def _judged_page(page: Page) -> JudgedPage:
    return JudgedPage(
        url=page.url,
        status=page.status,
        headers=dict(page.headers),
        content_type=page.content_type,
        body=page.body,
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
