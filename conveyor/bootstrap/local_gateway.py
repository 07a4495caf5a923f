"""Rendering beside direct fetches: a gateway process that `dev` and `scrape` start for the first
page that needs a browser (docs/gateway.md, On one machine).

This process only listens. The gateway is started when the first call arrives, inherits the socket,
and serves the call that waits in it. If the gateway ends, the next call starts another one. Without
Chromium, nothing listens, and pages that need a browser are refused when they are submitted.
"""

from __future__ import annotations

import logging
import random
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import trio

from actors.child_process import ProcessEnded, WorkerProcess
from conveyor.config import Settings, environ_of, program_environ
from conveyor.domain import limits
from conveyor.domain.budget import Price
from conveyor.domain.submit.scraper_params import (
    REMOTE_SUPPORT,
    GatewaySupport,
    needs_browser,
)
from conveyor.domain.submit.target import TargetPolicy
from conveyor.engines.http.zenrows import ZenrowsGateway
from conveyor.gateway.browser.chromium import find_chromium
from conveyor.gateway.call import find_refusal
from conveyor.gateway.content import direct_support, own_support
from conveyor.http_client.connection_limits import PoolLimits
from conveyor.http_client.pool import HttpPool
from conveyor.ports.gateway import Deferred, Gateway, Outcome, ScrapeRequest

log = logging.getLogger(__name__)

DIRECT = "direct"
BACKLOG = 1024
# A gateway that ends at once would otherwise be started in a tight loop.
RESTART_S = 1.0


@dataclass(frozen=True, slots=True)
class LocalGateway:
    """The socket, and the settings with which pages that need a browser are sent to it."""

    listener: socket.socket
    settings: Settings
    key: str

    @classmethod
    def prepare(cls, settings: Settings, randomness: random.Random) -> LocalGateway | None:
        """Listens, if the settings fetch directly and there is a Chromium; otherwise None."""
        if not can_start_renderer(settings):
            return None
        listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        key = randomness.randbytes(16).hex()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/?apikey={key}"
        gateway = replace(settings.gateway, renderer_url=url)
        return cls(listener, replace(settings, gateway=gateway), key)

    async def run(self) -> None:
        """Starts the gateway for the first call, and again for the next call if it ended."""
        descriptor = self.listener.fileno()
        process = WorkerProcess(
            command=(
                *(sys.executable, "-P", "-m", "conveyor.cli.main", "gateway"),
                *("--inherit", str(descriptor)),
            ),
            environ={
                **environ_of(self.settings),
                "CONVEYOR_AUTH": "keys",
                "CONVEYOR_API_KEYS": self.key,
                "CONVEYOR_API_KEYS_FILE": "",
                # The caller reports failed pages; the terminal of `scrape` shows its progress.
                "CONVEYOR_LOG_LEVEL": "warning",
                # Its only caller waits for a place instead of being refused one.
                "CONVEYOR_GATEWAY_CALLS": str(limits.GATEWAY_CALLS_MAX),
            },
            pass_fds=(descriptor,),
        )
        while True:
            await trio.lowlevel.wait_readable(self.listener)
            try:
                await process.run()
            except ProcessEnded as ended:
                log.warning("local gateway ended", extra={"cause": str(ended)})
                await trio.sleep(RESTART_S)


def can_start_renderer(settings: Settings) -> bool:
    is_direct = settings.gateway_url == DIRECT and settings.gateway.renderer_url is None
    return is_direct and find_chromium(settings.gateway.chromium, program_environ()) is not None


def find_support(settings: Settings, *, can_render: bool = False) -> GatewaySupport:
    """Returns what the gateway that the settings name does with parameters."""
    if settings.gateway_url != DIRECT:
        return REMOTE_SUPPORT
    if settings.gateway.renderer_url is None and not can_render:
        return direct_support()
    own = own_support({})
    return replace(direct_support(), rendering=own, check_rendering=partial(find_refusal, own))


@contextmanager
def add_renderer(
    direct: Gateway, settings: Settings, *, now: Callable[[], float]
) -> Iterator[Gateway]:
    """Opens a gateway that sends pages which need a browser to the renderer of the settings."""
    url = settings.gateway.renderer_url
    if url is None:
        yield direct
        return
    # The operator chose the address, or this program did, so it may be a private one.
    pool = HttpPool(
        TargetPolicy(allow_private=True), PoolLimits(read_timeout_s=limits.SCRAPE_DEADLINE_S)
    )
    try:
        yield RenderingGateway(direct, ZenrowsGateway(pool, url, now=now))
    finally:
        pool.close()


class RenderingGateway:
    """Fetches pages directly, except those that need a browser."""

    def __init__(self, direct: Gateway, renderer: Gateway) -> None:
        self._direct = direct
        self._renderer = renderer

    def price(self, params: Mapping[str, str]) -> Price:
        return Price()

    async def scrape(self, request: ScrapeRequest) -> Outcome:
        if not needs_browser(request.params):
            return await self._direct.scrape(request)
        outcome = await self._renderer.scrape(request)
        if isinstance(outcome, Deferred):
            return outcome
        # Direct fetches have no report: a renderer that fails must not hold them back.
        return msgspec.structs.replace(outcome, report=None, credits=0, cost_known=True)
