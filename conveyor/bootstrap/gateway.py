"""The wiring of `conveyor gateway`: the fetch service with its browsers (docs/gateway.md)."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from actors.runtime import Child
from conveyor.api.server.auth import Authenticator
from conveyor.bootstrap.body_memory import body_limits
from conveyor.bootstrap.runtime import make_authenticator, require_assertions, tune_memory
from conveyor.config import BadSettings, Settings, program_environ
from conveyor.domain import ids
from conveyor.domain.submit.target import TargetPolicy
from conveyor.engines.executor import COMPUTE_THREADS_MAX, ThreadExecutor
from conveyor.engines.http.proxy import BadProxy, Connections, open_route, parse_proxy
from conveyor.engines.system import SystemClock
from conveyor.gateway.browser.chromium import Launcher, find_chromium
from conveyor.gateway.browser.pool import BrowserPool, default_pages_max
from conveyor.gateway.content import open_processor
from conveyor.gateway.guarding_proxy import GuardingProxy
from conveyor.gateway.proxies import BadProxyFile, Proxy, ProxyPool, read_proxies
from conveyor.gateway.server import FetchApp
from conveyor.gateway.service import Service
from conveyor.http_client.pool import HttpPool
from conveyor.http_client.stream import default_tls

HOW_TO_INSTALL = (
    "install Chromium (apt install chromium, or pip install 'conveyor[browser]' and "
    "playwright install chromium), or name it in CONVEYOR_CHROMIUM"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchService:
    """The parts of the gateway. `children` run beside its server. `why_no_browser` is what to do
    about a missing one, and empty if there is one."""

    service: Service
    authenticator: Authenticator
    new_id: Callable[[], str]
    children: Sequence[Child]
    why_no_browser: str

    def app(self, ready: Callable[[], bool]) -> FetchApp:
        return FetchApp(self.service, self.authenticator, new_id=self.new_id, is_ready=ready)


@contextmanager
def _open_proxies(path: Path | None, connections: Connections) -> Iterator[ProxyPool]:
    proxies = []
    with ExitStack() as stack:
        try:
            for line in [] if path is None else read_proxies(path):
                route = stack.enter_context(open_route(parse_proxy(line.url), connections))
                proxies.append(Proxy(line.country, line.is_premium, route))
        except (BadProxy, BadProxyFile) as error:
            raise BadSettings(f"CONVEYOR_GATEWAY_PROXIES: {error}") from None
        yield ProxyPool(proxies)


@asynccontextmanager
async def open_fetch_service(
    settings: Settings, randomness: random.Random
) -> AsyncGenerator[FetchService, None]:
    """Without Chromium the gateway fetches plainly, and refuses what needs a browser."""
    require_assertions()
    tune_memory()
    policy = TargetPolicy(allow_private=settings.allow_private_targets)
    executor = ThreadExecutor(COMPUTE_THREADS_MAX)
    pool = HttpPool(policy, body_limits(settings), executor=executor)
    environ = program_environ()
    path = find_chromium(settings.gateway.chromium, environ)
    if path is None and settings.gateway.chromium is not None:
        raise BadSettings(f"CONVEYOR_CHROMIUM: there is no program {settings.gateway.chromium}")
    browsers = None
    if path is not None:
        browsers = BrowserPool(
            Launcher(
                path=path,
                environ=environ,
                executor=executor,
                has_sandbox=settings.gateway.chromium_sandbox,
            ),
            GuardingProxy(policy),
            pages_max=settings.gateway.gateway_pages or default_pages_max(os.cpu_count()),
            memory_mb_max=settings.gateway.gateway_browser_mb,
        )
    clock = SystemClock()
    # Callers are named only within this process, so the secret need not outlive it.
    authenticator = make_authenticator(settings, randomness.randbytes(32))
    # One context for all proxies: it takes longer to make than anything else about a proxy.
    connections = Connections(policy, body_limits(settings), default_tls(), executor)
    with (
        closing(pool),
        open_processor(executor) as processor,
        _open_proxies(settings.gateway.gateway_proxies, connections) as proxies,
    ):
        yield FetchService(
            service=Service(
                pool,
                browsers,
                processor,
                proxies,
                calls_max=settings.gateway.gateway_calls,
                why_no_browser=HOW_TO_INSTALL,
            ),
            authenticator=authenticator,
            new_id=lambda: ids.mint_ulid(clock.now(), randomness),
            children=[
                Child("browsers", run=browsers.run, reports_ready=True),
            ]
            if browsers is not None
            else [],
            why_no_browser="" if browsers is not None else HOW_TO_INSTALL,
        )
