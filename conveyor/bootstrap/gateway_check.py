"""What our own gateway lacks, and whether the gateway that the settings name answers
(docs/deploy.md, Check a deployment)."""

from __future__ import annotations

from contextlib import closing

import trio

from conveyor.bootstrap.gateway import HOW_TO_INSTALL
from conveyor.bootstrap.runtime import DIRECT
from conveyor.config import Settings, program_environ
from conveyor.domain.submit.target import BadUrl, TargetPolicy, parse_url
from conveyor.engines.executor import ThreadExecutor
from conveyor.engines.http.zenrows import has_key
from conveyor.gateway.browser.chromium import Launcher, find_chromium
from conveyor.gateway.browser.devtools import BrowserGone
from conveyor.gateway.proxies import BadProxyFile, read_proxies
from conveyor.http_client.errors import FetchFailed
from conveyor.http_client.exchange import Request
from conveyor.http_client.pool import HttpPool
from conveyor.schemas.responses import Finding

# A first start reads Chromium from the disk.
_START_S = 60.0
_ANSWER_S = 10.0
_UNAUTHORIZED = 401


async def check_gateway(settings: Settings) -> list[Finding]:
    """What the role `gateway` needs."""
    findings = [await _check_chromium(settings)]
    path = settings.gateway.gateway_proxies
    if path is not None:
        try:
            read_proxies(path)
            findings.append(Finding("proxies"))
        except BadProxyFile as error:
            findings.append(Finding("proxies", str(error), "correct CONVEYOR_GATEWAY_PROXIES"))
    return findings


async def _check_chromium(settings: Settings) -> Finding:
    environ = program_environ()
    path = find_chromium(settings.gateway.chromium, environ)
    if path is None:
        return Finding("Chromium", "pages cannot be rendered", HOW_TO_INSTALL)
    launcher = Launcher(
        path=path,
        environ=environ,
        executor=ThreadExecutor(1),
        has_sandbox=settings.gateway.chromium_sandbox,
    )
    has_answered = False
    try:
        async with launcher.open() as browser:
            await browser.devtools.call("Browser.getVersion", timeout_s=_START_S)
            has_answered = True
    except* (BrowserGone, trio.TooSlowError, OSError):
        pass  # The finding says so.
    if has_answered:
        return Finding("Chromium")
    return Finding(
        "Chromium",
        f"{path} does not start",
        "in a container, pass a seccomp profile that allows user namespaces, such as "
        "deploy/box/chromium-seccomp.json, and a writable /tmp; or set "
        "CONVEYOR_CHROMIUM_SANDBOX=off",
    )


async def check_remote_gateway(settings: Settings) -> list[Finding]:
    """The gateway to which API and workers send pages, or those that need a browser."""
    variable, url = "CONVEYOR_GATEWAY_URL", settings.gateway_url
    if url == DIRECT:
        variable, url = "CONVEYOR_RENDERER_URL", settings.gateway.renderer_url or ""
    target = parse_url(url) if url else None
    if target is None:
        return []
    if isinstance(target, BadUrl):
        return [Finding("gateway", f"{variable} is no URL", f"correct {variable}")]
    with closing(HttpPool(TargetPolicy(allow_private=True))) as pool:
        request = Request(method="GET", target=target, partition="check", deadline_s=_ANSWER_S)
        try:
            response = await pool.fetch(request)
        except FetchFailed as error:
            remedy = f"check {variable}, the network and the gateway"
            return [Finding("gateway", f"{target.host} does not answer: {error}", remedy)]
    if response.status == _UNAUTHORIZED and has_key(url):
        remedy = f"put a key that the gateway accepts into {variable}"
        return [Finding("gateway", f"{target.host} refuses the key", remedy)]
    return [Finding("gateway")]
