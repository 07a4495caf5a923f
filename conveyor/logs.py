"""Logs: formats log lines, as JSON or as text (docs/operations.md, Log lines).

Log lines never contain headers or keys. URLs are logged without their query strings, because query
strings contain tokens. This module does not know the domain.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

# A URL up to its query or fragment, which is replaced. It ends at whitespace, quotes or angle
# brackets, which surround URLs in messages.
_QUERY = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s?#\"'<>]*)[?#][^\s\"'<>]*", re.IGNORECASE)
# User name and password between the scheme and the host.
_USERINFO = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/?#@\"'<>]*@", re.IGNORECASE)
# Secret parameters of a path without scheme and host, which _QUERY does not match.
_TOKEN = re.compile(r"([?&](?:token|apikey|api_key|key)=)[^\s&\"'<>]+", re.IGNORECASE)
_OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_SECRET_FIELDS = frozenset({"headers", "api_key", "key", "authorization", "cookie", "token"})


def redact(text: str) -> str:
    """Removes the query strings and user names of all URLs in a text."""
    text = _USERINFO.sub(r"\1***@", text)
    text = _QUERY.sub(r"\1?***", text)
    return _TOKEN.sub(r"\1***", text)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Returns the fields of `extra`. Secrets are hidden even if they were passed by mistake."""
    return {
        name: "***" if name.lower() in _SECRET_FIELDS else _plain(value)
        for name, value in vars(record).items()
        if name not in _OWN_FIELDS
    }


def _plain(value: object) -> object:
    if isinstance(value, bool | int | float) or value is None:
        return value
    return redact(str(value))


def _instant(record: logging.LogRecord) -> str:
    text = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": _instant(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redact(record.getMessage()),
            **fields_of(record),
        }
        if record.exc_info:
            line["traceback"] = redact(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """Formats log lines for people."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in fields_of(record).items())
        line = f"{_instant(record)} {record.levelname:<7} {record.name}: "
        line += redact(record.getMessage()).replace("\n", "\\n")
        if fields:
            line += f" ({fields})".replace("\n", "\\n")
        if record.exc_info:
            line += "\n" + redact(self.formatException(record.exc_info))
        return line


FORMATTERS: dict[str, type[logging.Formatter]] = {"json": JsonFormatter, "text": TextFormatter}


# The id of the request that the current task serves. Tasks and threads that the request starts
# inherit it.
REQUEST_ID: ContextVar[str | None] = ContextVar("REQUEST_ID", default=None)


def add_request_id(record: logging.LogRecord) -> bool:
    """Adds the id of the current request to a log line. Passes every line."""
    request_id = REQUEST_ID.get()
    if request_id is not None and not hasattr(record, "request_id"):
        record.request_id = request_id
    return True


class FloodFilter(logging.Filter):
    """Passes a few equal warnings and errors in each window, and counts the others.

    Lines from the same statement are equal. Without the filter, a repeated outage or crash would
    fill the disk. The next line that passes contains the number of suppressed lines.
    """

    WINDOW_S = 60.0
    LINES_MAX = 10

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        # For each statement: the start of its window, the lines in it, the suppressed lines.
        self._windows: dict[tuple[str, int], tuple[float, int, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        key = (record.pathname, record.lineno)
        now = self._now()
        began_at, count, dropped = self._windows.get(key, (now, 0, 0))
        if now - began_at >= self.WINDOW_S:
            began_at, count = now, 0
        if count >= self.LINES_MAX:
            self._windows[key] = (began_at, count, dropped + 1)
            return False
        self._windows[key] = (began_at, count + 1, 0)
        if dropped:
            record.left_out = dropped
        return True


def set_up_logging(
    style: Literal["json", "text"], *, level: int = logging.INFO, stream: TextIO | None = None
) -> None:
    """Installs one handler on the root logger and removes all others."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(FORMATTERS[style]())
    handler.addFilter(FloodFilter())
    handler.addFilter(add_request_id)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
