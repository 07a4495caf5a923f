"""Call: one request to the fetch API, read from its query and its headers
(docs/gateway.md, Parameters).

Every parameter is honoured or refused with REQS004: a parameter that is ignored would return
another page than the caller asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import parse_qsl

import msgspec

from conveyor.domain.submit.scraper_params import (
    OF_THE_BROWSER,
    PARAMS,
    GatewaySupport,
    InvalidParam,
    allowed_statuses,
    check_params,
    find_extracting,
)
from conveyor.domain.submit.target import BadUrl, Target, parse_url
from conveyor.gateway.errors import CallFailed, Fault
from conveyor.gateway.instructions import Instruction, parse_instructions
from conveyor.http_client.pool import forwardable

METHODS = ("GET", "POST", "PUT")
# The whole call, so that its answer arrives before a worker gives up (SCRAPE_DEADLINE_S).
CALL_S_MAX = 170.0
WAIT_MS_MAX = 30_000
# Of the window, and of a screenshot of a whole page.
PIXELS_MAX = 16_384
_ON = frozenset({"true", "1"})
# What Conveyor's workers, the SDK and its HTTP library send by themselves, up to the first slash.
_OF_THE_CLIENT = frozenset({("accept", "*"), ("user-agent", "conveyor"), ("user-agent", "zenrows")})
# What `block_resources` may contain, and the browser's word for it.
RESOURCES = {
    "eventsource": "EventSource",
    "fetch": "Fetch",
    "font": "Font",
    "image": "Image",
    "manifest": "Manifest",
    "media": "Media",
    "other": "Other",
    "script": "Script",
    "stylesheet": "Stylesheet",
    "texttrack": "TextTrack",
    "websocket": "WebSocket",
    "xhr": "XHR",
}
# Parameters of the fetch API that a job does not have, with their defaults.
_ONLY_OF_CALLS = {
    "screenshot": "false",
    "screenshot_format": "png",
    "screenshot_fullpage": "false",
    "screenshot_quality": "",
    "screenshot_selector": "",
    "window_height": "1080",
    "window_width": "1920",
}


class Screenshot(msgspec.Struct, frozen=True, kw_only=True):
    format: str
    quality: int | None
    is_full_page: bool
    selector: str | None


class Rendering(msgspec.Struct, frozen=True, kw_only=True):
    """What a browser does with the page."""

    wait_s: float = 0.0
    wait_for: str | None = None
    instructions: tuple[Instruction, ...] = ()
    blocked: frozenset[str] = frozenset()
    is_json: bool = False
    is_pdf: bool = False
    screenshot: Screenshot | None = None
    width: int = 1920
    height: int = 1080

    @property
    def has_own_form(self) -> bool:
        """Whether the result is another document than the HTML of the page."""
        return self.is_json or self.is_pdf or self.screenshot is not None


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """`partition` names the caller: two of them share no connection. `params` are the checked
    parameters. Without `rendering` the page is fetched plainly; with `tries_plain` it is rendered
    if a plain fetch gets no page."""

    partition: str
    method: str
    target: Target
    params: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes | None = None
    body_content_type: str | None = None
    allowed: frozenset[int] = frozenset()
    keeps_status: bool = False
    rendering: Rendering | None = None
    tries_plain: bool = False


def query_of(query_string: bytes) -> dict[str, str]:
    """Reads the query. Raises CallFailed if it has a parameter twice."""
    try:
        pairs = parse_qsl(
            query_string.decode("ascii"), keep_blank_values=True, max_num_fields=64, errors="strict"
        )
    except (ValueError, UnicodeDecodeError):
        raise bad_parameter("The query cannot be read.") from None
    query: dict[str, str] = {}
    for name, value in pairs:
        if query.setdefault(name, value) is not value:
            raise bad_parameter(f"{name[:64]} is given twice.")
    return query


def call_from(
    method: str,
    query: Mapping[str, str],
    headers: Sequence[tuple[str, str]],
    body: bytes,
    *,
    partition: str,
    support: GatewaySupport,
) -> Call:
    """Checks a request to the fetch API. Raises CallFailed."""
    if method not in METHODS:
        raise CallFailed(Fault.METHOD_NOT_ALLOWED, f"The method is one of {', '.join(METHODS)}.")
    params = {name: value for name, value in query.items() if name not in {"apikey", "url"}}
    own = {name: params.pop(name, default) for name, default in _ONLY_OF_CALLS.items()}
    wants_headers = _is_on({"custom_headers": params.pop("custom_headers", "")}, "custom_headers")
    try:
        values = check_params(params).values
        support.check(values)
    except InvalidParam as error:
        raise bad_parameter(error.detail) from None
    _is_on(values, "premium_proxy")
    rendering = _rendering_from(method, values, own)
    if rendering is not None and method != "GET":
        raise bad_parameter("js_render cannot be combined with a body: only GET is rendered.")
    named = {name.lower(): value for name, value in headers}
    return Call(
        partition=partition,
        method=method,
        target=_target_from(query.get("url", "")),
        params=values,
        headers=_custom_headers(headers) if wants_headers else {},
        body=body or None,
        body_content_type=named.get("content-type") if body else None,
        allowed=allowed_statuses(values),
        keeps_status=_is_on(values, "original_status"),
        rendering=rendering,
        tries_plain=rendering is not None and _tries_plain(values, own),
    )


def find_refusal(support: GatewaySupport, params: Mapping[str, str]) -> str | None:
    """Returns why any page with these parameters would be refused, before a job is accepted."""
    query = {**params, "url": "http://example.com/"}
    try:
        call_from("GET", query, (), b"", partition="", support=support)
    except CallFailed as refusal:
        return refusal.detail
    return None


def bad_parameter(detail: str) -> CallFailed:
    return CallFailed(Fault.BAD_PARAMETER, detail)


def _target_from(url: str) -> Target:
    if not url:
        raise bad_parameter("url is missing.")
    target = parse_url(url)
    if isinstance(target, BadUrl):
        raise bad_parameter(f"url cannot be fetched: {target.detail}.")
    return target


def _custom_headers(headers: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Returns the headers for the site, without those that a client sends by itself."""
    return {
        name: value
        for name, value in forwardable(dict(headers))
        if (name.lower(), value.partition("/")[0]) not in _OF_THE_CLIENT
    }


def _rendering_from(
    method: str, values: Mapping[str, str], own: Mapping[str, str]
) -> Rendering | None:
    is_pdf = values.get("response_type") == "pdf"
    has_screenshot = _has_screenshot(own)
    for name in ("js_render", "premium_proxy"):
        if "mode" in values and name in values:
            raise bad_parameter(f"mode=auto chooses {name} by itself.")
    chooses = "mode" in values and method == "GET"
    if not _is_on(values, "js_render") and not chooses:
        needing = [
            name for name in sorted(OF_THE_BROWSER) if values.get(name, "").lower() not in _OFF
        ]
        needing += ["response_type=pdf"] if is_pdf else []
        needing += [
            name
            for name, default in _ONLY_OF_CALLS.items()
            if own[name] != default and not (default == "false" and own[name].lower() in _OFF)
        ]
        if needing:
            raise bad_parameter(f"{needing[0]} needs js_render=true.")
        return None
    has_other_result = has_screenshot or _is_on(values, "json_response")
    if is_pdf and has_other_result:
        raise bad_parameter("response_type=pdf cannot be combined with another form of the page.")
    if find_extracting(values) and has_other_result:
        raise bad_parameter("json_response and screenshots have no page to extract from.")
    return Rendering(
        wait_s=_number("wait", values.get("wait") or "0", WAIT_MS_MAX) / 1000,
        wait_for=values.get("wait_for") or None,
        instructions=parse_instructions(values.get("js_instructions") or "[]"),
        blocked=_blocked_from(values.get("block_resources", "")),
        is_json=_is_on(values, "json_response"),
        is_pdf=is_pdf,
        screenshot=_screenshot_from(own) if has_screenshot else None,
        width=_number("window_width", own["window_width"], PIXELS_MAX),
        height=_number("window_height", own["window_height"], PIXELS_MAX),
    )


def _has_screenshot(own: Mapping[str, str]) -> bool:
    """Raises CallFailed for an option of a screenshot that is not taken."""
    wishes = [_is_on(own, name) for name in ("screenshot", "screenshot_fullpage")]
    if any(wishes) or own["screenshot_selector"]:
        return True
    for name in ("screenshot_format", "screenshot_quality"):
        if own[name] != _ONLY_OF_CALLS[name]:
            raise bad_parameter(f"{name} needs screenshot=true.")
    return False


def _tries_plain(values: Mapping[str, str], own: Mapping[str, str]) -> bool:
    """What only a browser can do needs no plain fetch first."""
    needs_browser = any(values.get(name, "").lower() not in _OFF for name in OF_THE_BROWSER)
    changes_page = values.get("response_type") == "pdf" or own != _ONLY_OF_CALLS
    return "mode" in values and not (needs_browser or changes_page)


_OFF = frozenset({"", "false", "0"})


def _is_on(values: Mapping[str, str], name: str) -> bool:
    value = values.get(name, "").lower()
    if value not in _ON | _OFF:
        raise bad_parameter(f"{name} must be true or false.")
    return value in _ON


def _number(name: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and int(text) <= most):
        raise bad_parameter(f"{name} must be a whole number up to {most}.")
    return int(text)


def _blocked_from(text: str) -> frozenset[str]:
    words = {word.strip().lower() for word in text.split(",")} - {"", "none"}
    if unknown := sorted(words - RESOURCES.keys()):
        known = ", ".join(RESOURCES)
        raise bad_parameter(f"block_resources has no kind {unknown[0][:40]!r}; there are {known}.")
    return frozenset(words)


def _screenshot_from(own: Mapping[str, str]) -> Screenshot:
    kind, quality = own["screenshot_format"].lower(), own["screenshot_quality"]
    if kind not in {"png", "jpeg"}:
        raise bad_parameter("screenshot_format must be png or jpeg.")
    if quality and kind == "png":
        raise bad_parameter("screenshot_quality needs screenshot_format=jpeg.")
    return Screenshot(
        format=kind,
        quality=_number("screenshot_quality", quality, 100) if quality else None,
        is_full_page=own["screenshot_fullpage"].lower() in _ON,
        selector=own["screenshot_selector"] or None,
    )


assert not _ONLY_OF_CALLS.keys() & PARAMS.keys()
