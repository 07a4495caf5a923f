"""Chromium: finds the program and starts it, confined (docs/gateway.md, Browsers).

The command line closes every way around the guarding proxy: names are not resolved, loopback is
proxied too, and QUIC and UDP of WebRTC are off. Nothing of a user is read or kept: the profile is
an empty folder that is deleted when the browser ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import trio

from conveyor.gateway.browser.devtools import BrowserGone, DevTools
from conveyor.gateway.errors import CallRefused
from conveyor.ports.executor import Executor

_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
# Names another folder for the browsers of Playwright than its usual one.
PLAYWRIGHT = "PLAYWRIGHT_BROWSERS_PATH"
_PLAYWRIGHT = (
    "chromium_headless_shell-*/chrome-*/headless_shell",
    "chromium_headless_shell-*/chrome-*/chrome-headless-shell",
    "chromium-*/chrome-*/chrome",
    "chromium-*/chrome-mac*/Chromium.app/Contents/MacOS/Chromium",
)
# The most memory of the JavaScript of one page. A page that needs more ends as "crashed".
HEAP_MB_MAX = 512

_FEATURES_OFF = (
    "AcceptCHFrame",
    "AutofillServerCommunication",
    "BackForwardCache",
    "CertificateTransparencyComponentUpdater",
    "DialMediaRouteProvider",
    "DnsOverHttps",
    "GlobalMediaControls",
    "HttpsUpgrades",
    "InterestFeedContentSuggestions",
    # One page is one context and one process; frames of other sites in it need no more.
    "IsolateOrigins",
    "site-per-process",
    "LensOverlay",
    "MediaRouter",
    "OptimizationHints",
    "PaintHolding",
    "Prerender2",
    "Translate",
)
_OPTIONS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--no-default-browser-check",
    "--no-service-autorun",
    "--allow-pre-commit-input",
    "--block-new-web-contents",
    "--disable-back-forward-cache",
    "--disable-background-networking",
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-breakpad",
    "--disable-client-side-phishing-detection",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-dev-shm-usage",
    "--disable-domain-reliability",
    "--disable-extensions",
    "--disable-field-trial-config",
    "--disable-gpu",
    "--disable-hang-monitor",
    "--disable-ipc-flooding-protection",
    "--disable-prompt-on-repost",
    "--disable-quic",
    "--disable-renderer-backgrounding",
    "--disable-site-isolation-trials",
    "--disable-sync",
    "--font-render-hinting=none",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--hide-scrollbars",
    "--metrics-recording-only",
    "--mute-audio",
    "--password-store=basic",
    "--use-mock-keychain",
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    f"--disable-features={','.join(_FEATURES_OFF)}",
    f"--js-flags=--max-old-space-size={HEAP_MB_MAX}",
)
# Chromium reads commands from descriptor 3 and writes to 4. A child of Python gets descriptors only
# under their own numbers, so this program moves them and becomes Chromium.
_LAUNCHER = (
    "import os, sys; commands, answers = int(sys.argv[1]), int(sys.argv[2]); "
    "os.dup2(commands, 3); os.dup2(answers, 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_CLOSE_S = 2.0
_END_S = 5.0


def find_chromium(name: str | None, environ: Mapping[str, str]) -> str | None:
    """Returns the path of Chromium: the one of the settings, the system's or Playwright's; None if
    there is none."""
    if name is not None:
        return shutil.which(name)
    of_system = next(filter(None, map(shutil.which, _NAMES)), None)
    return of_system or next(_playwrights_browsers(environ), None)


def _playwrights_browsers(environ: Mapping[str, str]) -> Iterator[str]:
    cache = "Library/Caches" if sys.platform == "darwin" else ".cache"
    folder = Path(environ.get(PLAYWRIGHT) or Path.home() / cache / "ms-playwright")
    for pattern in _PLAYWRIGHT:
        yield from sorted(map(str, folder.glob(pattern)), reverse=True)


class Chromium:
    """A running browser. It ends with its pipe, and its processes form one group."""

    def __init__(self, process: trio.Process, devtools: DevTools) -> None:
        self.devtools = devtools
        self._process = process

    @property
    def process_id(self) -> int:
        return self._process.pid

    async def close(self) -> None:
        """Asks the browser to end. It then waits for its own processes, which would otherwise be
        left to process 1, and in a container nobody may wait for them there."""
        with trio.move_on_after(_CLOSE_S, shield=True), suppress(BrowserGone, CallRefused):
            await self.devtools.call("Browser.close")
            await self._process.wait()

    def kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """Starts browsers. Without a proxy of its own, a page of a browser reaches nothing."""

    path: str
    environ: Mapping[str, str]
    executor: Executor
    has_sandbox: bool = True

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[Chromium, None]:
        """Starts a browser, and kills it at the end."""
        profile = await self.executor.run(_make_profile)
        try:
            options = _options(profile, has_sandbox=self.has_sandbox)
            process = _open_process(self.path, options, _environment(profile, self.environ))
            async with process as browser, trio.open_nursery() as nursery:
                nursery.start_soon(browser.devtools.run)
                try:
                    yield browser
                finally:
                    await browser.close()
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self.executor.run(_delete_profile, profile)


@asynccontextmanager
async def _open_process(
    path: str, options: list[str], environ: Mapping[str, str]
) -> AsyncGenerator[Chromium, None]:
    read_commands, write_commands = os.pipe()
    read_answers, write_answers = os.pipe()
    assert min(read_commands, write_answers) > 4, "the event loop has lower descriptors open"
    theirs = (read_commands, write_answers)
    async with (
        trio.lowlevel.FdStream(write_commands) as commands,
        trio.lowlevel.FdStream(read_answers) as answers,
    ):
        try:
            process = await trio.lowlevel.open_process(
                [
                    *(sys.executable, "-ISc", _LAUNCHER, *map(str, theirs)),
                    *(path, *options, "about:blank"),
                ],
                pass_fds=theirs,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environ,
                start_new_session=True,
            )
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        browser = Chromium(process, DevTools(commands, answers))
        try:
            yield browser
        finally:
            browser.kill()
            with trio.move_on_after(_END_S, shield=True):
                await process.wait()


def _options(profile: str, *, has_sandbox: bool) -> list[str]:
    options = [
        *_OPTIONS,
        f"--user-data-dir={profile}",
        f"--disk-cache-dir={profile}/cache",
        # Every context has a proxy of its own. Nothing listens at this address.
        "--proxy-server=http://127.0.0.1:9",
        # Without this, loopback addresses would not be proxied.
        "--proxy-bypass-list=<-loopback>",
        # The proxy resolves all names. Anything that tried to resolve one itself would fail.
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ]
    # Chromium refuses to start its sandbox as root.
    return options if has_sandbox and os.geteuid() != 0 else [*options, "--no-sandbox"]


def _environment(profile: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without secrets and proxies of this process."""
    harmless = {name: environ[name] for name in ("PATH", "LANG", "TZ") if name in environ}
    return {**harmless, "HOME": profile, "XDG_CONFIG_HOME": profile, "XDG_CACHE_HOME": profile}


def _make_profile() -> str:
    return tempfile.mkdtemp(prefix="conveyor-browser-")


def _delete_profile(profile: str) -> None:
    # A process of the browser may still write for a moment, and what remains is in a folder of
    # temporary files.
    shutil.rmtree(profile, ignore_errors=True)
