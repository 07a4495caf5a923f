"""BrowserPool: renders pages in a bounded number of browsers (docs/gateway.md, Browsers).

A browser starts when a page needs it, and takes `PAGES_PER_BROWSER` pages at a time, so that a
browser that crashes interrupts few of them. It is recycled after `SERVED_MAX` pages or when its
memory exceeds the limit: no more pages begin in it, and it ends with its last page. When it needs
twice the limit, its largest process is killed at once. Most often that is the one of the page which
needs the memory, and the other pages go on. Where it serves all pages, the browser ends.

A page whose browser ended, for whatever reason, is rendered again in another one, within the
deadline of its call: only GET is rendered, so a repetition is safe. A page whose own process
crashed gets one more attempt, because the page itself may be the reason. So does a page whose
browser needed too much memory, and in a browser of its own, where it is certainly the reason.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import trio

from conveyor.gateway.browser.chromium import Chromium, Launcher
from conveyor.gateway.browser.devtools import BrowserGone
from conveyor.gateway.browser.rendering import PageCrashed, render
from conveyor.gateway.call import Call
from conveyor.gateway.errors import CallFailed, Fault
from conveyor.gateway.guarding_proxy import Dial, GuardingProxy, ProxyPort
from conveyor.gateway.page import Page

log = logging.getLogger(__name__)

PAGES_PER_BROWSER = 4
# Browsers leak slowly. A start costs about a second of CPU time, so this adds some milliseconds to
# a page.
SERVED_MAX = 500
# Browsers that may be killed under one call before it fails.
BROWSERS_MAX = 5
CRASHES_MAX = 2
# A browser that has not answered by then does not start at all: a library or memory is missing.
START_S = 30.0
WATCH_S = 2.0
# The time between the end of the first process of a browser and the end of its pipe.
ENDING_S = 1.0
# A recycled browser whose pages never end is killed.
RETIRE_S = 180.0


@dataclass(eq=False, slots=True)
class _Slot:
    """One browser. `ready` is set when it has started or failed to."""

    ready: trio.Event = field(default_factory=trio.Event)
    retired: trio.Event = field(default_factory=trio.Event)
    idle: trio.Event = field(default_factory=trio.Event)
    browser: Chromium | None = None
    page_count: int = 0
    served_count: int = 0
    pages_max: int = PAGES_PER_BROWSER
    needed_too_much: bool = False

    @property
    def has_room(self) -> bool:
        is_dead = self.ready.is_set() and (self.browser is None or self.browser.devtools.is_gone)
        return not is_dead and not self.retired.is_set() and self.page_count < self.pages_max

    def retire(self) -> None:
        self.retired.set()
        if self.page_count == 0:
            self.idle.set()


class BrowserPool:
    """`run` keeps the browsers; `render` may be called while it runs."""

    def __init__(
        self, launcher: Launcher, proxy: GuardingProxy, *, pages_max: int, memory_mb_max: int
    ) -> None:
        self._launcher = launcher
        self._proxy = proxy
        self._pages = trio.CapacityLimiter(pages_max)
        self._memory_bytes_max = memory_mb_max * 1024 * 1024
        self._slots: list[_Slot] = []
        self._nursery: trio.Nursery | None = None
        self.started_count = 0

    @property
    def browser_ids(self) -> Sequence[int]:
        """The process ids of the browsers that run now."""
        return [slot.browser.process_id for slot in self._slots if slot.browser is not None]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._watch_memory)
            task_status.started()
            await trio.sleep_forever()

    async def render(self, call: Call, dial: Dial | None = None) -> Page:
        """`dial` is the way through another proxy. Raises CallFailed, and NotRenderable for a URL
        that is no page."""
        # A waiting call keeps its order, and its deadline ends the wait.
        assert self._nursery is not None, "the pool does not run"
        opening = self._proxy.open_port(self._nursery, call.partition, dial)
        async with self._pages, opening as port:
            return await self._render(call, port)

    async def _render(self, call: Call, port: ProxyPort) -> Page:
        crash_count = 0
        is_alone = False
        for _ in range(BROWSERS_MAX):
            slot = self._take_slot(is_alone=is_alone)
            try:
                return await self._render_in(slot, call, port)
            except PageCrashed:
                is_of_page = not await _is_ending(slot)
            except BrowserGone:
                is_of_page = False
                # A browser that cannot start would otherwise be started again in a tight loop.
                await trio.sleep(0.05)
            if not is_of_page:
                slot.retire()
            is_alone = is_alone or slot.needed_too_much
            crash_count += is_of_page or slot.needed_too_much
            if crash_count >= CRASHES_MAX:
                detail = "the page crashed its process, or needed too much memory"
                raise CallFailed(Fault.NO_CONTENT, detail)
        raise CallFailed(Fault.INTERNAL, "the browser ended repeatedly while it rendered the page")

    async def _render_in(self, slot: _Slot, call: Call, port: ProxyPort) -> Page:
        try:
            await slot.ready.wait()
            if slot.browser is None:
                raise BrowserGone
            return await render(slot.browser, call, port)
        finally:
            slot.page_count -= 1
            if slot.served_count >= SERVED_MAX:
                slot.retire()
            if slot.page_count == 0 and slot.retired.is_set():
                slot.idle.set()

    def _take_slot(self, *, is_alone: bool) -> _Slot:
        """Returns the browser with the fewest pages, or a new one if all are full, or for a page
        that must be alone."""
        with_room = [slot for slot in self._slots if slot.has_room and not is_alone]
        slot = min(with_room, key=lambda slot: slot.page_count, default=None)
        if slot is None:
            assert self._nursery is not None, "the pool does not run"
            slot = _Slot(pages_max=1 if is_alone else PAGES_PER_BROWSER)
            self._slots.append(slot)
            self._nursery.start_soon(self._keep, slot)
        slot.page_count += 1
        slot.served_count += 1
        return slot

    async def _keep(self, slot: _Slot) -> None:
        """Runs one browser until it is retired and idle, or gone."""
        try:
            async with self._launcher.open() as browser:
                await browser.devtools.call("Browser.getVersion", timeout_s=START_S)
                slot.browser = browser
                self.started_count += 1
                slot.ready.set()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(browser.devtools.wait_gone)
                    await self._wait_retired(slot)
                    nursery.cancel_scope.cancel()
        except* (BrowserGone, trio.TooSlowError, OSError) as errors:
            cause = repr(errors.exceptions[0])
            if slot.browser is None:
                log.warning(
                    "browser did not start", extra={"path": self._launcher.path, "cause": cause}
                )
            else:
                log.warning("browser ended", extra={"cause": cause})
        finally:
            slot.browser = None
            slot.ready.set()
            slot.retired.set()
            self._slots.remove(slot)

    async def _wait_retired(self, slot: _Slot) -> None:
        await slot.retired.wait()
        with trio.move_on_after(RETIRE_S):
            await slot.idle.wait()

    async def _watch_memory(self) -> None:
        while True:
            await trio.sleep(WATCH_S)
            running = {slot.browser.process_id: slot for slot in self._slots if slot.browser}
            used = await self._launcher.executor.run(measure_groups, frozenset(running))
            for process_id, memory in used.items():
                if memory.size_bytes > self._memory_bytes_max:
                    running[process_id].retire()
                if memory.size_bytes > 2 * self._memory_bytes_max:
                    running[process_id].needed_too_much = True
                    log.warning(
                        "process killed: the browser needs too much memory",
                        extra={
                            "bytes": memory.size_bytes,
                            "bytes_of_process": memory.largest_bytes,
                        },
                    )
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(memory.largest_id, signal.SIGKILL)


async def _is_ending(slot: _Slot) -> bool:
    """Whether the page crashed because its whole browser ends: its processes end one by one."""
    with trio.move_on_after(ENDING_S), suppress(BrowserGone):
        if slot.browser is not None:
            await slot.browser.devtools.wait_gone()
    return slot.browser is None or slot.browser.devtools.is_gone


@dataclass(slots=True)
class GroupMemory:
    """What a process group uses, and its largest process."""

    size_bytes: int = 0
    largest_id: int = 0
    largest_bytes: int = 0


def measure_groups(group_ids: frozenset[int]) -> Mapping[int, GroupMemory]:
    """Returns the private resident bytes of these process groups; nothing where the system has no
    /proc. Pages that the processes of a browser share would otherwise count several times."""
    used: dict[int, GroupMemory] = {}
    if not sys.platform.startswith("linux") or not group_ids:
        return used
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # The name of the program is in brackets, and may contain spaces.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            group_id = int(fields[2])
            if group_id in group_ids:
                _, resident, shared = (folder / "statm").read_text().split()[:3]
                size_bytes = (int(resident) - int(shared)) * 4096
                memory = used.setdefault(group_id, GroupMemory())
                memory.size_bytes += size_bytes
                if size_bytes > memory.largest_bytes:
                    memory.largest_id, memory.largest_bytes = int(folder.name), size_bytes
        except (OSError, ValueError, IndexError):
            continue  # It has ended since.
    return used


def default_pages_max(cpu_count: int | None) -> int:
    """Rendering computes more than it waits."""
    return 2 * math.ceil(cpu_count or 1)
