"""Live updates: one stream of server-sent events for each open page (docs/dashboard.md, Live
updates).

About once a second the page is built again, and the blocks that changed are sent. The first frame
has every block, so that a browser that lost its connection misses nothing.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec
import trio

from conveyor.api.server.quota import Held
from conveyor.domain.errors import NotFound, Refused
from conveyor.ports.errors import Unavailable
from conveyor.ui.render import render_blocks
from conveyor.ui.visit import Page, Visit
from conveyor.usecases.context import Context

INTERVAL_S = 1.0
# A proxy closes a silent connection, commonly after 60 s.
HEARTBEAT_S = 15.0
_STAND_IN_BITS = 128
# Streams of the same page share what was built this recently.
_FRESH_S = 0.8
# For each caller one page at a time is built, with a pause after it, so that watching a run does
# not slow it down. The pause is ten times as long as the build took, but no longer than
# _PAUSE_S_MAX: under load a build takes long because it waits, and one page is to be built about
# once a second even then.
_PAUSE_FACTOR = 10
_PAUSE_S_MAX = 0.5
_KEPT_MAX = 256

Build = Callable[[Visit], Awaitable[Any]]


class StandIns(NamedTuple):
    """Texts in the place of values that differ from one visitor to the next. They are random, so
    that no text of a caller can contain one."""

    token: str
    once: str

    def fill(self, blocks: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, str]:
        return {
            name: text.replace(self.token, values["token"]).replace(self.once, values["once"])
            for name, text in blocks.items()
        }


def make_stand_ins(env: Context) -> StandIns:
    return StandIns(*(f"{env.random.getrandbits(_STAND_IN_BITS):032x}" for _ in range(2)))


@dataclass(slots=True)
class _Pace:
    """Builds one page at a time."""

    lock: trio.Lock = field(default_factory=trio.Lock)
    next_at: float = -math.inf

    async def build(self, build: Callable[[], Awaitable[dict[str, str]]]) -> dict[str, str]:
        async with self.lock:
            await trio.sleep_until(self.next_at)
            began_at = trio.current_time()
            try:
                return await build()
            finally:
                now = trio.current_time()
                self.next_at = now + min(_PAUSE_S_MAX, _PAUSE_FACTOR * (now - began_at))


@dataclass(slots=True)
class _Shared:
    lock: trio.Lock = field(default_factory=trio.Lock)
    fresh_until: float = -math.inf
    blocks: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SharedFragments:
    """The latest blocks of each page, so that many visitors of a caller with the same page cost as
    much as one. Tokens of forms are not shared: stand-ins are in their places.
    """

    pages: dict[str, _Shared] = field(default_factory=dict)
    paces: dict[str, _Pace] = field(default_factory=dict)

    async def get(
        self, caller: str, page: str, build: Callable[[], Awaitable[dict[str, str]]]
    ) -> dict[str, str]:
        """Returns the blocks of a page. `page` also names the role of the visitor."""
        if len(self.pages) >= _KEPT_MAX:
            self.pages.clear()
            self.paces.clear()
        pace = self.paces.setdefault(caller, _Pace())
        shared = self.pages.setdefault(f"{caller}|{page}", _Shared())
        async with shared.lock:
            if trio.current_time() >= shared.fresh_until:
                shared.blocks = await pace.build(build)
                shared.fresh_until = trio.current_time() + _FRESH_S
            return shared.blocks


def read_query(text: str) -> dict[str, str]:
    return dict(parse_qsl(text))


async def follow(
    visit: Visit,
    build: Build,
    values: Callable[[], dict[str, Any]],
    shared: SharedFragments,
    stand_ins: StandIns,
    page: str,
) -> AsyncGenerator[bytes, None]:
    """Opens the stream of a page. `values` are those that every template may use."""
    own = values()
    common = {**own, **stand_ins._asdict()}
    viewer = visit.viewer
    role = f"{viewer.role}|{viewer.is_read_only}|{viewer.is_signed_in}"

    async def blocks() -> dict[str, str]:
        built = await build(visit)
        if not isinstance(built, Page):
            raise NotFound("There is nothing to follow at this address.")
        now = {"now": visit.env.now()}
        return render_blocks(built.template, {**common, **now, **built.values})

    look = partial(shared.get, viewer.name, f"{role}|{page}", blocks)

    # Before the first byte: a page that does not exist is answered with 404.
    first = await look()
    held = visit.api.requests.hold_stream(visit.viewer.name, visit.address)
    fill = partial(stand_ins.fill, values=own)
    return _frames(visit, first, look, fill, held)


async def _frames(
    visit: Visit,
    sent: dict[str, str],
    look: Callable[[], Awaitable[dict[str, str]]],
    fill: Callable[[dict[str, str]], dict[str, str]],
    held: Held,
) -> AsyncGenerator[bytes, None]:
    try:
        yield b"retry: 2000\n\n" + _frame(fill(sent))
        spoke_at = trio.current_time()
        while visit.api.is_ready() and visit.is_still_accepted:
            await trio.sleep(INTERVAL_S)
            try:
                frame = await look()
            except Unavailable:
                continue  # The next look may succeed; the page keeps what it shows.
            except Refused:
                return  # The job was deleted, or the key was revoked: a reload shows it.
            changed = {name: text for name, text in frame.items() if sent.get(name) != text}
            if changed:
                yield _frame(fill(changed))
            elif trio.current_time() - spoke_at >= HEARTBEAT_S:
                yield b": still here\n\n"
            else:
                continue
            sent, spoke_at = frame, trio.current_time()
    finally:
        held.release()


def _frame(blocks: dict[str, str]) -> bytes:
    return b"event: blocks\ndata: " + msgspec.json.encode(blocks) + b"\n\n"
