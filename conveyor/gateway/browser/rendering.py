"""Renders one page in a context of its own (docs/gateway.md, Browsers).

A context is a fresh profile in memory: two pages share no cookie, cache, storage or connection. It
is disposed of when the page ends, whatever happened, and with it the processes of the page.

Our functions run in an isolated world, where the page can change neither what they call nor what
they return. Only `evaluate` instructions run in the world of the page.

The page counts as loaded when its `load` event has occurred and it has had no request under way
for QUIET_S, so that data that it fetches is there. A page that never stops is taken after SETTLE_S,
and one whose document is complete but lacks an image or a frame after LOAD_S.

Every command to a page is bounded: a page whose scripts never pause answers none, and would
otherwise keep its place, and a processor, for the whole time of the call.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from math import inf
from typing import Any

import msgspec
import trio

from conveyor.domain import limits
from conveyor.domain.submit.target import LOCATION_CHARS_MAX, BadUrl, Target, parse_url
from conveyor.gateway.browser.chromium import Chromium
from conveyor.gateway.browser.devtools import GONE, BrowserGone
from conveyor.gateway.browser.requests import RequestFilter, RequestLog
from conveyor.gateway.call import PIXELS_MAX, Call, Rendering, Screenshot
from conveyor.gateway.errors import CallFailed, CallRefused, Fault, failure_from, failure_of_status
from conveyor.gateway.guarding_proxy import ProxyPort
from conveyor.gateway.instructions import EVENTS, WAIT_FOR_ELEMENT, perform
from conveyor.gateway.page import Page, RenderReport

# Longer than the pause between the data and the next request that a page makes with it.
QUIET_S = 0.1
# After `load`. Pages that poll would never be quiet.
SETTLE_S = 8.0
# From the start of the answer to `load`.
LOAD_S = 30.0
# A page whose scripts compute for longer without a pause never answers.
ANSWER_S = 30.0
# What a command may take besides: together with ANSWER_S, a navigation waits for a site as long as
# a plain fetch, and about a thousand pages are printed.
NAVIGATE_S = 30.0
PRINT_S = 30.0
# An `evaluate` instruction. Less than ANSWER_S, because a script that waits fails only itself.
SCRIPT_S = 25.0
# Less than a caller waits for a page by default (60 s), so that he learns what was missing.
WAIT_FOR_S = 45.0
# A context that is not disposed of in this time belongs to a browser that hangs.
DISPOSE_S = 5.0
# XHR bodies that `json_response` may contain together.
XHR_BYTES_MAX = 8 * 1024 * 1024

# Removed before any script of the page runs: what could reach the network without the proxy, and
# what could outlive the page. The proxy and the context hold without this too.
_CONFINEMENT = """(() => {
    for (const name of ['RTCPeerConnection', 'webkitRTCPeerConnection', 'RTCDataChannel',
                        'WebTransport', 'TCPSocket', 'UDPSocket'])
        delete globalThis[name];
    delete Navigator.prototype.serviceWorker;
})()"""
_READ_HTML = """bytesMax => {
    const type = document.doctype;
    const id = type && type.publicId ? ` PUBLIC "${type.publicId}"` : '';
    const system = type && type.systemId ? `${id ? '' : ' SYSTEM'} "${type.systemId}"` : '';
    const html = (type ? `<!DOCTYPE ${type.name}${id}${system}>` : '')
        + (document.documentElement?.outerHTML ?? '');
    return html.length > bytesMax ? null : html;
}"""
_READ_BOX = """selector => {
    let element;
    try { element = document.querySelector(selector); } catch { return 'invalid'; }
    const box = element?.getBoundingClientRect();
    return box ? [box.x + scrollX, box.y + scrollY, box.width, box.height] : null;
}"""
_WORLD = "conveyor"
_NO_ANSWER = "the page did not answer: its scripts do not end, or it navigates without end"
# Chromium makes a document of its own of these, in which it plays or shows them.
_MEDIA = ("application/pdf", "audio/", "image/", "multipart/", "video/")


class _Frame(msgspec.Struct, rename="camel"):
    """What a frame shows. `unreachable_url` is that of a page for which the browser shows an error
    of its own."""

    id: str = ""
    loader_id: str = ""
    url: str = ""
    unreachable_url: str = ""


class _Navigation(msgspec.Struct):
    frame: _Frame


class _FrameEvent(msgspec.Struct, rename="camel"):
    frame_id: str = ""


class PageCrashed(Exception):
    """The process of the page ended. The browser and its other pages live."""


class NotRenderable(Exception):
    """The URL is a download, or a file that no browser shows as a page."""


async def render(browser: Chromium, call: Call, port: ProxyPort) -> Page:
    """Loads the page and does what the call asks for. Raises CallFailed, BrowserGone,
    PageCrashed and NotRenderable."""
    assert call.rendering is not None
    async with _open_page(browser, call, port) as page:
        await page.load()
        return await page.read(call.rendering)


@asynccontextmanager
async def _open_page(
    browser: Chromium, call: Call, port: ProxyPort
) -> AsyncGenerator[_BrowserPage, None]:
    devtools = browser.devtools
    context = await devtools.call(
        "Target.createBrowserContext",
        {
            "disposeOnDetach": True,
            "proxyServer": port.url,
            "proxyBypassList": "<-loopback>",
        },
    )
    context_id = context["browserContextId"]
    page = None
    try:
        of_context = {"browserContextId": context_id}
        created = await devtools.call("Target.createTarget", {"url": "about:blank", **of_context})
        attached = await devtools.call(
            "Target.attachToTarget", {"targetId": created["targetId"], "flatten": True}
        )
        page = _BrowserPage(browser, attached["sessionId"], created["targetId"], call, port)
        await page.prepare()
        yield page
    except (BrowserGone, CallRefused) as error:
        if devtools.is_gone:
            raise BrowserGone from error
        if page is not None and page.is_crashed:
            raise PageCrashed from error
        raise CallFailed(Fault.NO_CONTENT, "the page could not be rendered") from error
    finally:
        if page is not None:
            page.close()
        await _dispose(browser, context_id)


async def _dispose(browser: Chromium, context_id: str) -> None:
    with trio.CancelScope(shield=True):
        try:
            await browser.devtools.call(
                "Target.disposeBrowserContext",
                {"browserContextId": context_id},
                timeout_s=DISPOSE_S,
            )
        except (BrowserGone, CallRefused):
            pass
        except trio.TooSlowError:
            browser.kill()


class _BrowserPage:
    """One page. The state changes in `_on_event`; `_changed` wakes those who wait for it."""

    def __init__(
        self, browser: Chromium, session_id: str, frame_id: str, call: Call, port: ProxyPort
    ) -> None:
        self._devtools = browser.devtools
        self._session_id = session_id
        self._frame_id = frame_id
        self._call_params = call
        self._port = port
        self._worlds: dict[str, int] = {}
        self._occurred: set[str] = set()
        self._changed = trio.Event()
        self._shown = _Frame()
        self._requests = RequestLog(frame_id, on_change=self._wake)
        self._filter = RequestFilter(call)
        self.is_crashed = False

    @property
    def _rendering(self) -> Rendering:
        rendering = self._call_params.rendering
        assert rendering is not None
        return rendering

    async def prepare(self) -> None:
        """Configures the page before it loads anything. One command after the other: a group of
        errors would hide that the browser ended."""
        self._devtools.listen(self._session_id, self._on_event)
        rendering = self._rendering
        body_bytes = XHR_BYTES_MAX if rendering.is_json else 0
        buffers = {"maxTotalBufferSize": body_bytes, "maxResourceBufferSize": body_bytes}
        size = {"width": rendering.width, "height": rendering.height}
        commands: list[tuple[str, dict[str, Any]]] = [
            ("Page.enable", {}),
            ("Page.setLifecycleEventsEnabled", {"enabled": True}),
            ("Network.enable", buffers),
            ("Page.addScriptToEvaluateOnNewDocument", {"source": _CONFINEMENT}),
            ("Page.setInterceptFileChooserDialog", {"enabled": True}),
            (
                "Emulation.setDeviceMetricsOverride",
                {**size, "deviceScaleFactor": 1, "mobile": False},
            ),
            ("Page.setDownloadBehavior", {"behavior": "deny"}),
            *self._filter.commands,
        ]
        for method, params in commands:
            await self._command(method, params)

    def close(self) -> None:
        self._devtools.forget(self._session_id)

    async def load(self) -> None:
        """Navigates, and waits until the page is loaded."""
        target = self._call_params.target
        with _answering(NAVIGATE_S, "the site did not answer in time"):
            answer = await self._command("Page.navigate", {"url": target.url}, wait_s=inf)
        if failure := answer.get("errorText"):
            raise self._navigation_failure(failure, target)
        with trio.move_on_after(LOAD_S):
            await self._wait(lambda: not self._occurred.isdisjoint({"load", "stopped"}))
        if self._occurred.isdisjoint({"domcontentloaded", "stopped"}):
            raise CallFailed(Fault.TOO_SLOW, f"the page did not load within {LOAD_S:.0f} s")
        rendering = self._rendering
        if rendering.wait_for is None:
            await self._settle()
        else:
            await self._wait_for(rendering.wait_for)

    async def read(self, rendering: Rendering) -> Page:
        """Performs the instructions, waits, and returns the page in the form that is asked for."""
        instructions = None
        if rendering.instructions:
            instructions = await perform(self, rendering.instructions)
            await self._settle()
        if rendering.wait_s:
            await trio.sleep(rendering.wait_s)
        response = self._requests.main_response
        if response is None:
            raise CallFailed(Fault.NO_CONTENT, "the site sent no page")
        self._refuse_what_no_site_sent()
        if not rendering.has_own_form and dict(response.headers).get("content-type", "").startswith(
            _MEDIA
        ):
            raise NotRenderable
        screenshot = None
        if rendering.screenshot is not None:
            screenshot = await self._take_screenshot(rendering.screenshot)
        html = await self._read_html()
        picture = await self._read_picture(rendering, screenshot)
        body, content_type = (html, "text/html; charset=utf-8") if picture is None else picture
        headers = tuple(pair for pair in response.headers if pair[0] not in _OF_THE_TRANSFER)
        xhr = await self._read_xhr() if rendering.is_json else []
        return Page(
            url=response.url,
            status=response.status,
            headers=(("content-type", content_type), *headers),
            body=body,
            report=RenderReport(xhr=xhr, instructions=instructions, screenshot=screenshot),
            html=None if picture is None else html,
            site_type=dict(response.headers).get("content-type", ""),
        )

    async def _read_picture(
        self, rendering: Rendering, screenshot: dict[str, Any] | None
    ) -> tuple[bytes, str] | None:
        """Returns the PDF or the screenshot, if one of them is the result."""
        if rendering.is_pdf:
            options = {"printBackground": True}
            printed = await self._command("Page.printToPDF", options, wait_s=PRINT_S)
            return base64.b64decode(printed["data"]), "application/pdf"
        if screenshot is not None and not rendering.is_json:
            return base64.b64decode(screenshot["data"]), screenshot["type"]
        return None

    async def _read_html(self) -> bytes:
        html: str | None = await self.evaluate(_READ_HTML, limits.BODY_BYTES_MAX)
        encoded = None if html is None else html.encode(errors="replace")
        if encoded is None or len(encoded) > limits.BODY_BYTES_MAX:
            raise CallFailed(Fault.TOO_LARGE, f"it has more than {limits.BODY_BYTES_MAX} bytes")
        return encoded

    async def _take_screenshot(self, options: Screenshot) -> dict[str, Any]:
        metrics = await self._command("Page.getLayoutMetrics")
        view, content = metrics["cssVisualViewport"], metrics["cssContentSize"]
        x, y, width, height = 0.0, 0.0, view["clientWidth"], view["clientHeight"]
        if options.is_full_page:
            width, height = content["width"], content["height"]
        if options.selector is not None:
            box = await self.evaluate(_READ_BOX, options.selector)
            if box == "invalid":
                raise CallFailed(Fault.BAD_PARAMETER, "screenshot_selector is invalid")
            if box is None:
                raise CallFailed(Fault.NO_CONTENT, "no element matches screenshot_selector")
            x, y, width, height = box
        width, height = min(max(width, 1), PIXELS_MAX), min(max(height, 1), PIXELS_MAX)
        params: dict[str, Any] = {
            "format": options.format,
            "captureBeyondViewport": True,
            "clip": {"x": x, "y": y, "width": width, "height": height, "scale": 1},
        }
        if options.quality is not None:
            params["quality"] = options.quality
        capture = await self._command("Page.captureScreenshot", params)
        size = {"width": round(width), "height": round(height)}
        return {"data": capture["data"], "type": f"image/{options.format}", **size}

    async def _read_xhr(self) -> list[dict[str, Any]]:
        lines = []
        bytes_left = XHR_BYTES_MAX
        for request in self._requests.xhr():
            body = ""
            try:
                response = await self._command("Network.getResponseBody", {"requestId": request.id})
            except CallRefused:
                pass  # It was too large, or the page has navigated away since.
            else:
                body = response["body"]
            bytes_left -= len(body)
            if bytes_left < 0:
                break
            lines.append(request.to_json(body))
        return lines

    # What the instructions need of a page.

    async def evaluate(
        self, function: str, *arguments: object, frame: str | None = None, wait_s: float = 0.0
    ) -> Any:
        with _answering(wait_s):
            result = await self._in_context(
                await self._frame_of(frame),
                lambda world: {
                    "functionDeclaration": function,
                    "executionContextId": world,
                    "arguments": [{"value": argument} for argument in arguments],
                },
                wait_s,
            )
        return result.get("value")

    async def run_script(self, script: str, *, frame: str | None = None) -> None:
        # `Runtime.evaluate` without a context runs in the page's own world of the main frame. In
        # another frame, a script element gives the same.
        if frame is None:
            params = {
                "expression": script,
                "awaitPromise": True,
                "userGesture": True,
                # Of what it computes; it may also wait for a promise.
                "timeout": SCRIPT_S * 1000,
            }
            with trio.move_on_after(SCRIPT_S + 1.0) as scope:
                answer = await self._command("Runtime.evaluate", params)
                _refuse_exception(answer)
            if scope.cancelled_caught:
                raise CallRefused("script", f"it did not end within {SCRIPT_S:.0f} s")
            return
        inject = """script => {
            const element = document.createElement('script');
            element.textContent = script;
            document.documentElement.append(element);
            element.remove();
        }"""
        await self.evaluate(inject, script, frame=frame)

    async def wait_for_event(self, name: str) -> None:
        assert name in EVENTS
        if name.startswith("network"):
            await self._wait_until_quiet(0.5)
        else:
            await self._wait(lambda: name in self._occurred)

    async def _frame_of(self, selector: str | None) -> str:
        if selector is None:
            return self._frame_id
        document = await self._command("DOM.getDocument", {"depth": 0})
        query = {"nodeId": document["root"]["nodeId"], "selector": selector}
        match = await self._command("DOM.querySelector", query)
        node = await self._command("DOM.describeNode", {"nodeId": match["nodeId"]})
        frame_id: str | None = node["node"].get("frameId")
        if frame_id is None:
            raise CallRefused("frame", "the selector does not match a frame")
        return frame_id

    async def _in_context(
        self, frame_id: str, params: Callable[[int], dict[str, Any]], wait_s: float
    ) -> dict[str, Any]:
        """Calls a function in our world of a frame. A navigation destroys the world, and then the
        call is created again in the next one."""
        while True:
            world = self._worlds.get(frame_id) or await self._make_world(frame_id)
            call = {**params(world), "awaitPromise": True, "returnByValue": True}
            try:
                answer = await self._command("Runtime.callFunctionOn", call, wait_s=wait_s)
            except CallRefused:
                if self._worlds.get(frame_id) == world:
                    raise
                continue
            _refuse_exception(answer)
            result: dict[str, Any] = answer["result"]
            return result

    async def _make_world(self, frame_id: str) -> int:
        created = await self._command(
            "Page.createIsolatedWorld", {"frameId": frame_id, "worldName": _WORLD}
        )
        world: int = created["executionContextId"]
        self._worlds[frame_id] = world
        return world

    async def _command(
        self, method: str, params: dict[str, Any] | None = None, *, wait_s: float = 0.0
    ) -> dict[str, Any]:
        with _answering(wait_s):
            return await self._devtools.call(method, params, session_id=self._session_id)

    # Waiting.

    async def _wait(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            if self._devtools.is_gone:
                raise BrowserGone
            if self.is_crashed:
                raise PageCrashed
            if self._requests.is_too_large:
                raise CallFailed(Fault.TOO_LARGE, f"it has more than {limits.BODY_BYTES_MAX} bytes")
            if self._requests.is_broken:
                raise CallFailed(Fault.NO_CONTENT, "the answer of the site broke off")
            await self._changed.wait()

    async def _settle(self) -> None:
        with trio.move_on_after(SETTLE_S):
            await self._wait_until_quiet(QUIET_S)

    async def _wait_until_quiet(self, seconds: float) -> None:
        while True:
            await self._wait(lambda: self._requests.pending_count == 0)
            with trio.move_on_after(seconds):
                await self._wait(lambda: self._requests.pending_count > 0)
                continue
            return

    async def _wait_for(self, selector: str) -> None:
        failure: str | None = "no element matches the selector"
        # A page that navigates starts the wait of the function anew.
        with trio.move_on_after(WAIT_FOR_S + 1.0):
            failure = await self.evaluate(
                WAIT_FOR_ELEMENT, selector, int(WAIT_FOR_S * 1000), wait_s=WAIT_FOR_S
            )
        if failure is not None:
            invalid = "invalid" in failure
            fault = Fault.BAD_PARAMETER if invalid else Fault.NO_CONTENT
            raise CallFailed(fault, f"wait_for: {failure}")

    def _navigation_failure(self, text: str, target: Target) -> Exception:
        if "ERR_ABORTED" in text:
            return NotRenderable()
        for (host, port), error in self._port.failures.items():
            if (host, port) == (target.host, target.port) or len(self._port.failures) == 1:
                return failure_from(error)
        if "INVALID_AUTH_CREDENTIALS" in text:
            return failure_of_status(401)
        if "CERT" in text or "SSL" in text:
            return CallFailed(Fault.NO_CONTENT, "the TLS connection failed")
        return CallFailed(Fault.NO_CONTENT, "the page could not be loaded")

    def _refuse_what_no_site_sent(self) -> None:
        """The page may have gone on to an address that the browser shows as an error, or to an
        empty one. Neither is what the site has at its URL."""
        if self._shown.url.startswith(("http:", "https:", "blob:")):
            return
        target = parse_url(self._shown.unreachable_url, chars_max=LOCATION_CHARS_MAX)
        if isinstance(target, BadUrl):
            raise CallFailed(Fault.NO_CONTENT, "the page went to an address without a page")
        raise self._navigation_failure("", target)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # Events.

    def _on_event(self, method: str, raw: msgspec.Raw) -> None:
        if method.startswith("Network."):
            self._requests.take(method, raw)
        elif method == "Fetch.requestPaused":
            decision, params = self._filter.decide(raw)
            self._post(decision, params)
        elif method == "Page.frameNavigated":
            self._worlds.clear()
            frame = msgspec.json.decode(raw, type=_Navigation).frame
            if frame.id == self._frame_id:
                self._shown = frame
                self._requests.commit(frame.loader_id)
        elif method in {"Page.frameStartedLoading", "Page.frameStoppedLoading"}:
            self._note_loading(method, raw)
        elif method == "Page.loadEventFired":
            self._occurred.add("load")
            self._wake()
        elif method == "Page.domContentEventFired":
            self._occurred.add("domcontentloaded")
            self._wake()
        elif method == "Page.javascriptDialogOpening":
            # A dialog would stop the page for ever.
            self._post("Page.handleJavaScriptDialog", {"accept": True})
        elif method in {"Inspector.targetCrashed", GONE}:
            self.is_crashed = True
            self._devtools.forget(self._session_id)
            self._wake()

    def _note_loading(self, method: str, raw: msgspec.Raw) -> None:
        """A page that starts a navigation which leads nowhere, such as a download or a mail, while
        it is read has no `load` event. It is as loaded as it will be when the browser stops."""
        if msgspec.json.decode(raw, type=_FrameEvent).frame_id != self._frame_id:
            return
        if method == "Page.frameStartedLoading":
            self._occurred.discard("stopped")
        elif self._shown.url:
            self._occurred.add("stopped")
            self._wake()

    def _post(self, method: str, params: dict[str, Any]) -> None:
        if not self._devtools.post(method, params, session_id=self._session_id):
            # A page that asks faster than the browser answers is treated as crashed.
            self.is_crashed = True
            self._devtools.forget(self._session_id)
            self._wake()


# The transfer of the page to the browser has them, and not the body that is returned.
_OF_THE_TRANSFER = frozenset(
    {"content-type", "content-length", "content-encoding", "transfer-encoding"}
)


@contextmanager
def _answering(wait_s: float, detail: str = _NO_ANSWER) -> Iterator[None]:
    """Bounds what the page has to answer, and for which it may wait so long itself."""
    try:
        with trio.fail_after(wait_s + ANSWER_S):
            yield
    except trio.TooSlowError:
        raise CallFailed(Fault.TOO_SLOW, detail) from None


def _refuse_exception(answer: dict[str, Any]) -> None:
    if (details := answer.get("exceptionDetails")) is not None:
        description = details.get("exception", {}).get("description") or details.get("text", "")
        raise CallRefused("script", str(description).split("\n")[0][:200])
