"""Renders templates: the environment of Jinja, its filters, and the headers of every page.

Templates escape every value. They contain no inline script and no inline style, which the
Content-Security-Policy forbids; bars and charts are SVG with plain attributes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, Template

import conveyor
from conveyor.api.server.docs_page import make_environment
from conveyor.logs import redact
from conveyor.schemas.views import instant
from conveyor.ui.access import Viewer
from conveyor.ui.words import (
    CRAWL_ENDS,
    EVENTS,
    FAILURES,
    REMEDIES,
    SKIPS,
    explain_wait,
)

_HERE = Path(__file__).parent
STATIC = _HERE / "static"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; object-src 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-DNS-Prefetch-Control": "off",
}
# A body of a foreign site. The sandbox gives it an origin of its own without scripts and forms, and
# the policy lets it load nothing.
PREVIEW_HEADERS = {
    "Content-Security-Policy": (
        "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        "frame-ancestors 'self'"
    ),
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-DNS-Prefetch-Control": "off",
}

# Shown where there is no value.
NOTHING = "\N{EN DASH}"
_SIZES = ("B", "kB", "MB", "GB", "TB")


@cache
def _environment() -> Environment:
    environment = make_environment(_HERE / "templates")
    environment.filters |= {
        "number": number,
        "duration": duration,
        "size": size,
        "moment": moment,
        "clock": clock,
        "took": took,
        "short": short,
        "percent": percent,
        "money": money,
        "sentence": sentence,
        "instant": instant,
        "receiver": receiver,
        "delivery_error": delivery_error,
    }
    environment.globals |= {
        "version": conveyor.__version__,
        "explain_wait": explain_wait,
        "CRAWL_ENDS": CRAWL_ENDS,
        "EVENTS": EVENTS,
        "FAILURES": FAILURES,
        "REMEDIES": REMEDIES,
        "SKIPS": SKIPS,
    }
    return environment


def template(name: str) -> Template:
    return _environment().get_template(name)


def render(name: str, values: Mapping[str, Any]) -> str:
    return template(name).render(values)


def render_blocks(name: str, values: Mapping[str, Any]) -> dict[str, str]:
    """Renders the blocks of a page that change while it is open: those named `live_...`."""
    page = template(name)
    # The macros that the layout imports. Its top level does not run here.
    parts = template("parts.html").make_module(dict(values))
    context = page.new_context({**values, "parts": parts})
    return {
        block: "".join(parts(context)).strip()
        for block, parts in page.blocks.items()
        if block.startswith("live_")
    }


def number(value: float | None) -> str:
    """A count with separators; a rate below ten with one digit after the point."""
    if value is None:
        return NOTHING
    if not float(value).is_integer():
        return f"{value:,.1f}" if value < 10 else f"{value:,.0f}"
    return f"{int(value):,}"


def money(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"${value:,.2f}" if value >= 1 or value == 0 else f"${value:,.4f}"


def percent(part: float, whole: float) -> str:
    if not whole:
        return "0 %"
    share = 100.0 * part / whole
    return f"{share:.0f} %" if share >= 10 or share == 0 else f"{share:.1f} %"


def duration(seconds: float | None) -> str:
    """Seconds in words: the two largest units at most."""
    if seconds is None:
        return NOTHING
    if seconds < 1:
        return f"{max(0.0, seconds):.1f} s"
    whole = math.floor(seconds)
    for unit_s, name, smaller_s, smaller in (
        (86_400, "d", 3_600, "h"),
        (3_600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= unit_s:
            rest = (whole % unit_s) // smaller_s
            return f"{whole // unit_s} {name}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def size(count: float | None) -> str:
    if count is None:
        return NOTHING
    value = float(count)
    for unit in _SIZES:
        if value < 1000 or unit == _SIZES[-1]:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


def moment(text: str | None) -> str:
    """An instant of the API, to the second. The script turns it into local time."""
    if text is None:
        return NOTHING
    return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%d %b %H:%M UTC")


def took(started: str, ended: str) -> str:
    """The time between two instants of the API."""
    between = datetime.fromisoformat(ended) - datetime.fromisoformat(started)
    return duration(between.total_seconds())


def sentence(text: str) -> str:
    """A detail of the API as a sentence."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def receiver(url: str, viewer: Viewer) -> str:
    """The URL of a receiver. Its query may contain a token, which operators do not see."""
    return redact(url) if viewer.is_operator and viewer.principal is None else url


def delivery_error(code: str) -> str:
    """The error of a delivery in words: of `http_5xx:500`, `transport_error:...` or `timeout`."""
    kind, _, detail = code.partition(":")
    if kind.startswith("http_"):
        return f"answered {detail}"
    return detail if kind == "transport_error" and detail else code.replace("_", " ")


def short(text: str, length: int = 60) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
