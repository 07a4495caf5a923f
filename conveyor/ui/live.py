"""Live updates: one stream of server-sent events for each open page (docs/dashboard.md, Live
updates).

About once a second the page is built again, and the blocks that changed are sent. The first frame
has every block, so that a browser that lost its connection misses nothing.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

import msgspec
import trio

from conveyor.api.server.quota import Held
from conveyor.domain.errors import NotFound, Refused
from conveyor.ports.errors import Unavailable
from conveyor.ui.render import render_blocks
from conveyor.ui.visit import Page, Visit

INTERVAL_S = 1.0
# A proxy closes a silent connection, commonly after 60 s.
HEARTBEAT_S = 15.0
# Streams of the same page share what was built this recently.
_FRESH_S = 0.8
# A page that takes long to build is built less often: building takes at most a twenty-fifth of the
# time, so that watching a run does not slow it down. Even so, a page is never older than this.
_BUILD_SHARE = 25
_FRESH_S_MAX = 10.0
_KEPT_MAX = 256

Build = Callable[[Visit], Awaitable[Any]]


@dataclass(slots=True)
class _Shared:
    lock: trio.Lock = field(default_factory=trio.Lock)
    fresh_until: float = -math.inf
    blocks: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SharedFragments:
    """The latest blocks of each page, so that many browsers with the same page cost as much as
    one."""

    pages: dict[str, _Shared] = field(default_factory=dict)

    async def get(self, key: str, build: Callable[[], Awaitable[dict[str, str]]]) -> dict[str, str]:
        shared = self.pages.get(key)
        if shared is None:
            if len(self.pages) >= _KEPT_MAX:
                self.pages.clear()
            shared = self.pages.setdefault(key, _Shared())
        async with shared.lock:
            began_at = trio.current_time()
            if began_at >= shared.fresh_until:
                shared.blocks = await build()
                now = trio.current_time()
                fresh_s = max(_FRESH_S, (now - began_at) * _BUILD_SHARE)
                shared.fresh_until = now + min(fresh_s, _FRESH_S_MAX)
            return shared.blocks


def read_query(text: str) -> dict[str, str]:
    return dict(parse_qsl(text))


async def follow(
    visit: Visit,
    build: Build,
    values: Callable[[], dict[str, Any]],
    shared: SharedFragments,
    key: str,
) -> AsyncGenerator[bytes, None]:
    """Opens the stream of a page. `values` are those that every template may use."""
    common = values()

    async def blocks() -> dict[str, str]:
        page = await build(visit)
        if not isinstance(page, Page):
            raise NotFound("There is nothing to follow at this address.")
        now = {"now": visit.env.now()}
        return render_blocks(page.template, {**common, **now, **page.values})

    # Before the first byte: a page that does not exist is answered with 404.
    first = await shared.get(key, blocks)
    held = visit.api.requests.hold_stream(visit.viewer.name, visit.address)
    return _frames(visit, first, lambda: shared.get(key, blocks), held)


async def _frames(
    visit: Visit,
    sent: dict[str, str],
    look: Callable[[], Awaitable[dict[str, str]]],
    held: Held,
) -> AsyncGenerator[bytes, None]:
    try:
        yield b"retry: 2000\n\n" + _frame(sent)
        spoke_at = trio.current_time()
        while visit.api.is_ready() and visit.is_still_accepted:
            await trio.sleep(INTERVAL_S)
            try:
                found = await look()
            except Unavailable:
                continue  # The next look may succeed; the page keeps what it shows.
            except Refused:
                return  # The job was deleted, or the key was revoked: a reload shows it.
            changed = {name: text for name, text in found.items() if sent.get(name) != text}
            if changed:
                yield _frame(changed)
            elif trio.current_time() - spoke_at >= HEARTBEAT_S:
                yield b": still here\n\n"
            else:
                continue
            sent, spoke_at = found, trio.current_time()
    finally:
        held.release()


def _frame(blocks: dict[str, str]) -> bytes:
    return b"event: blocks\ndata: " + msgspec.json.encode(blocks) + b"\n\n"
