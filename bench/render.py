"""Measures what a rendered page costs at our gateway, compared with Playwright and crawlee
(docs/gateway.md, Browsers).

Each arm renders the same page of a local shop, whose product list a script fetches, each page in a
new browser context. The CPU time is that of all processes of the arm, browsers included, from start
to end: the arm runs below a subreaper, which waits for all of them. The memory is the most private
memory that they used together. The site is another process.
    python -m bench render --pages 60 --together 2
    python -m bench render --pages 1000 --arms gateway     memory after each 100 pages
    python -m bench render --arms gateway --kill-every 3   kills browsers at random
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import click
import trio

from conveyor.domain.submit.target import TargetPolicy
from conveyor.gateway.browser.chromium import find_chromium
from conveyor.gateway.browser.pool import BrowserPool, measure_groups
from conveyor.gateway.call import Call
from conveyor.gateway.errors import CallFailed, Fault
from conveyor.gateway.guarding_proxy import GuardingProxy
from conveyor.gateway.page import Page
from tests.gateway.browsers import a_rendering, running_pool
from tests.gateway.site import serve_site

ARMS = ("gateway", "playwright", "crawlee")
SELECTOR = ".product"
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


@click.command()
@click.option("--pages", default=60, show_default=True, help="Pages of each arm.")
@click.option("--together", default=2, show_default=True, help="Pages at the same time.")
@click.option("--arms", default=",".join(ARMS), show_default=True)
@click.option(
    "--kill-every", type=float, help="Mean seconds between kills of the gateway's browsers."
)
@click.option("--only", hidden=True, help="Runs one arm against this URL.")
def main(pages: int, together: int, arms: str, kill_every: float | None, only: str | None) -> None:
    if only is not None:
        run = partial(_run_gateway, kill_every=kill_every) if arms == "gateway" else _ARMS[arms]
        _run_arm(arms, run, only, pages, together)
        return
    costs: dict[str, float] = {}
    with serve_site() as site:
        for arm in arms.split(","):
            if arm == "crawlee" and importlib.util.find_spec("crawlee") is None:
                print("crawlee     is not installed: pip install 'crawlee[playwright]'")
                continue
            command = [sys.executable, "-m", "bench", "render", "--only", f"{site.url}/"]
            sizes = ["--pages", str(pages), "--together", str(together), "--arms", arm]
            kills = [] if kill_every is None else ["--kill-every", str(kill_every)]
            with subprocess.Popen(
                [*command, *sizes, *kills], stdout=subprocess.PIPE, text=True
            ) as running:
                assert running.stdout is not None
                line = ""
                for line in running.stdout:
                    print(line, end="", flush=True)
            if running.returncode:
                print(f"{arm} failed")
            else:
                costs[arm] = float(line.rpartition("cpu/page ")[2].split()[0])
    for arm, cost in costs.items():
        if arm != "gateway" and "gateway" in costs:
            print(f"CPU of a page, gateway / {arm}: {costs['gateway'] / cost:.2f}")


def _run_arm(
    arm: str, run: Callable[[str, int, int], None], url: str, pages: int, together: int
) -> None:
    """Runs the arm in a child process, and waits for the child and its orphaned descendants."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    began_at = time.monotonic()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run(url, pages, together)
            status = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            sys.stdout.flush()
            os._exit(status)
    statuses, sizes = {}, [0]
    threading.Thread(target=_sample_memory, args=(sizes,), daemon=True).start()
    while True:
        try:
            process_id, status = os.wait()
        except ChildProcessError:
            break
        statuses[process_id] = status
    seconds = time.monotonic() - began_at
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    cost_ms = (usage.ru_utime + usage.ru_stime) / pages * 1000
    rate, memory = f"{pages * 60 / seconds:6.0f} pages/min", f"{max(sizes) / 1e6:.0f} MB"
    print(f"{arm:11} {rate}, cpu/page {cost_ms:.0f} ms, memory {memory}", flush=True)
    sys.exit(1 if statuses[child] else 0)


def _sample_memory(sizes: list[int]) -> None:
    while True:
        sizes.append(_private_bytes_below(os.getpid()))
        time.sleep(0.5)


def _private_bytes_below(root: int) -> int:
    """Returns the private resident bytes of all processes below this one."""
    children: dict[int, list[int]] = {}
    private: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError, ValueError, IndexError):  # The process has ended since.
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            _, resident, shared = (folder / "statm").read_text().split()[:3]
            children.setdefault(parent, []).append(int(folder.name))
            private[int(folder.name)] = (int(resident) - int(shared)) * 4096
    below, total_bytes = [root], 0
    while below:
        ids = children.get(below.pop(), [])
        total_bytes += sum(private[process_id] for process_id in ids)
        below += ids
    return total_bytes


def _run_gateway(url: str, pages: int, together: int, kill_every: float | None = None) -> None:
    trio.run(_render_in_pool, url, pages, together, kill_every)


async def _render_in_pool(url: str, pages: int, together: int, kill_every: float | None) -> None:
    call = a_rendering(url, {"wait_for": SELECTOR})
    proxy = GuardingProxy(TargetPolicy(allow_private=True))
    async with running_pool(proxy, pages_max=together) as pool, trio.open_nursery() as killing:
        left = iter(range(1, pages + 1))
        repeated: list[int] = []
        if kill_every is not None:
            killing.start_soon(_kill_at_random, pool, kill_every)

        async def render_some() -> None:
            for number in left:
                while (page := await _render_or_fail(pool, call)) is None:
                    repeated.append(number)
                assert page.body.count(b'class="product"') == 20
                if number % 100 == 0:
                    print(f"    {number:5} pages: {_memory_mb(pool)}", flush=True)

        async with trio.open_nursery() as nursery:
            for _ in range(together):
                nursery.start_soon(render_some)
        killing.cancel_scope.cancel()
        print(f"gateway     memory at the end: {_memory_mb(pool)}")
        print(
            f"gateway     browsers started: {pool.started_count}, calls repeated: {len(repeated)}"
        )


async def _render_or_fail(pool: BrowserPool, call: Call) -> Page | None:
    """Returns None if the call failed as a worker would repeat it: its browsers were killed too
    often."""
    try:
        return await pool.render(call)
    except CallFailed as failed:
        if failed.fault is not Fault.INTERNAL:
            raise
        return None


async def _kill_at_random(pool: BrowserPool, every_s: float) -> None:
    moments = random.Random(1)
    killed: set[int] = set()
    try:
        while True:
            await trio.sleep(moments.expovariate(1 / every_s))
            while not (running := sorted(set(pool.browser_ids) - killed)):
                await trio.sleep(0.05)
            victim = moments.choice(running)
            killed.add(victim)
            with suppress(ProcessLookupError):  # The browser has ended by itself since.
                os.killpg(victim, signal.SIGKILL)
    finally:
        print(f"gateway     browsers killed: {len(killed)}")


def _memory_mb(pool: BrowserPool) -> str:
    with open("/proc/self/statm") as statm:
        own = int(statm.read().split()[1]) * 4096
    browsers = sum(
        group.size_bytes for group in measure_groups(frozenset(pool.browser_ids)).values()
    )
    return f"browsers {browsers / 1e6:.0f} MB, gateway {own / 1e6:.0f} MB"


def _run_playwright(url: str, pages: int, together: int) -> None:
    async def run() -> None:
        from playwright.async_api import async_playwright

        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(
                executable_path=_chromium(), args=["--no-sandbox"]
            )

            async def render() -> None:
                context = await browser.new_context()
                page = await context.new_page()
                await page.goto(url)
                await page.wait_for_selector(SELECTOR, state="attached")
                assert (await page.content()).count('class="product"') == 20
                await context.close()

            await _together(render, pages, together)
            await browser.close()

    asyncio.run(run())


def _run_crawlee(url: str, pages: int, together: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # Otherwise crawlee writes its queue into a folder below the working directory.
        os.environ["CRAWLEE_STORAGE_DIR"] = folder
        _crawl(url, pages, together)


def _crawl(url: str, pages: int, together: int) -> None:
    async def run() -> None:
        from crawlee import ConcurrencySettings, Request
        from crawlee.crawlers import PlaywrightCrawler

        crawler: Any = PlaywrightCrawler(
            use_incognito_pages=True,
            browser_launch_options={"executable_path": _chromium(), "args": ["--no-sandbox"]},
            concurrency_settings=ConcurrencySettings(
                min_concurrency=together, desired_concurrency=together, max_concurrency=together
            ),
        )
        done: list[str] = []

        async def handle(context: Any) -> None:
            page = context.page
            await page.wait_for_selector(SELECTOR, state="attached")
            assert (await page.content()).count('class="product"') == 20
            done.append(url)

        crawler.router.default_handler(handle)

        requests = [Request.from_url(url, unique_key=str(number)) for number in range(pages)]
        await crawler.run(requests)
        assert len(done) == pages

    asyncio.run(run())


async def _together(render: Callable[[], Awaitable[None]], pages: int, together: int) -> None:
    left = iter(range(pages))

    async def render_some() -> None:
        for _ in left:
            await render()

    await asyncio.gather(*(render_some() for _ in range(together)))


def _chromium() -> str:
    path = find_chromium(None, os.environ)
    assert path is not None, "Chromium is not installed"
    return path


_ARMS = {
    "gateway": _run_gateway,
    "playwright": _run_playwright,
    "crawlee": _run_crawlee,
}
