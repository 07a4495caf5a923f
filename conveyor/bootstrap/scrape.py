"""The wiring of `conveyor scrape`: the gateways that fetch its pages (docs/scrape.md).

A scrape has no store, no queue and no actors: its folder is the store of record, and one process
decides what is fetched. Only the gateways are those of the service.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from conveyor.bootstrap.local_gateway import add_renderer, can_start_renderer, find_support
from conveyor.config import Settings
from conveyor.domain import limits
from conveyor.domain.submit.scraper_params import GatewaySupport
from conveyor.domain.submit.target import TargetPolicy
from conveyor.engines.executor import COMPUTE_THREADS_MAX, ThreadExecutor
from conveyor.engines.http.direct import DirectGateway
from conveyor.engines.http.proxy import Connections, RotatingGateway, parse_proxy, proxied_gateway
from conveyor.gateway.content import open_processor
from conveyor.http_client.connection_limits import PoolLimits
from conveyor.http_client.pool import HttpPool
from conveyor.http_client.stream import default_tls
from conveyor.ports.gateway import Gateway

DIRECT = "direct"


@contextmanager
def open_scrape_gateway(
    settings: Settings,
    *,
    now: Callable[[], float],
    slots: int,
    timeout_s: float,
    proxies: Sequence[str] = (),
    is_insecure: bool = False,
) -> Iterator[Gateway]:
    """Opens the gateway that the settings name, for `slots` pages at the same time."""
    tls = _unverified_tls() if is_insecure else None
    policy = TargetPolicy(allow_private=settings.allow_private_targets)
    pool_limits = _pool_limits(slots, timeout_s)
    executor = ThreadExecutor(COMPUTE_THREADS_MAX)
    with ExitStack() as stack:

        def pool(policy: TargetPolicy) -> HttpPool:
            opened = HttpPool(policy, pool_limits, tls=tls, executor=executor)
            stack.callback(opened.close)
            return opened

        if settings.gateway_url != DIRECT:
            from conveyor.engines.http.zenrows import ZenrowsGateway

            # The caller chose the address of the gateway, so it may be a private one.
            yield ZenrowsGateway(
                pool(TargetPolicy(allow_private=True)),
                settings.gateway_url,
                now=now,
                credit_micros=settings.credit_micros,
            )
        elif proxies:
            processor = stack.enter_context(open_processor(executor))
            connections = Connections(policy, pool_limits, tls, executor)
            proxied = [
                stack.enter_context(
                    proxied_gateway(parse_proxy(text), connections, now=now, processor=processor)
                )
                for text in proxies
            ]
            yield RotatingGateway(proxied)
        else:
            processor = stack.enter_context(open_processor(executor))
            direct = DirectGateway(pool(policy), now=now, processor=processor)
            yield stack.enter_context(add_renderer(direct, settings, now=now))


def find_scrape_support(settings: Settings, *, has_proxies: bool) -> GatewaySupport:
    """Returns what the gateway that the settings name does for a scrape, which starts a browser
    itself. Proxies are for direct fetches."""
    if has_proxies:
        settings = replace(settings, gateway=replace(settings.gateway, renderer_url=None))
    return find_support(settings, can_render=not has_proxies and can_start_renderer(settings))


def check_proxy(text: str) -> None:
    """Raises ValueError if the text is not the URL of a proxy."""
    parse_proxy(text)


def gateway_has_key(settings: Settings) -> bool:
    """Whether no API key is needed: pages are fetched directly, or the gateway's URL has one."""
    if settings.gateway_url == DIRECT:
        return True
    from conveyor.engines.http.zenrows import has_key

    return has_key(settings.gateway_url)


def _pool_limits(slots: int, timeout_s: float) -> PoolLimits:
    return PoolLimits(
        connections_max=2 * slots + 64,
        connections_per_origin_max=max(slots, 8),
        connect_timeout_s=min(10.0, timeout_s),
        read_timeout_s=min(timeout_s, limits.SCRAPE_DEADLINE_S),
        has_one_caller=True,
    )


def _unverified_tls() -> ssl.SSLContext:
    context = default_tls()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
