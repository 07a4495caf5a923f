"""The pages of a list and the lines of results.jsonl, as values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec


class Page(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One line of the list. `flaw` states why the line is no page that can be fetched."""

    url: str
    id: str | None = None
    method: str = "GET"
    headers: dict[str, str] | None = None
    body: bytes | None = None
    content_type: str | None = None
    params: dict[str, str] | None = None
    line: int = 0
    flaw: str | None = None


class PageStatus(StrEnum):
    """What became of a page."""

    SUCCESSFUL = "successful"
    FAILED = "failed"
    INVALID = "invalid"  #: The line is no usable URL.
    DUPLICATE = "duplicate"  #: The list has the same request earlier (--dedup).


class ResultLine(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One line of results.jsonl. `offset` and `length` locate a page in a shared file."""

    index: int
    url: str
    status: str
    id: str | None = None
    file: str | None = None
    offset: int | None = None
    length: int | None = None
    http_status: int | None = None
    final_url: str | None = None
    content_type: str | None = None
    bytes: int | None = None
    sha256: str | None = None
    seconds: float | None = None
    attempts: int | None = None
    error: str | None = None
    detail: str | None = None


class Answer(msgspec.Struct, array_like=True, gc=False):
    """What one fetch of a page came to. A process that helps sends it to the first one.

    `is_deferred`: the call was not made, or was refused for a reason that is not the page's.
    `throttle_s`: the site, or the gateway, asked for fewer requests; 0 if it named no time.
    """

    index: int
    seconds: float
    http_status: int | None = None
    file: str | None = None
    offset: int | None = None
    length: int | None = None
    size_bytes: int | None = None
    sha256: str | None = None
    content_type: str | None = None
    final_url: str | None = None
    error: str | None = None
    detail: str | None = None
    reason: str | None = None
    is_retryable: bool = False
    is_deferred: bool = False
    is_throttled: bool = False
    retry_after_s: float | None = None
    run_failure: str | None = None
    gateway_limit: int | None = None
    credits: int = 0
    cost_micros: int = 0
    is_cost_known: bool = True


def fingerprint(pages: Iterable[Page]) -> str:
    """Returns the identity of a list: what is fetched, in which order."""
    digest = hashlib.sha256()
    encode = msgspec.msgpack.Encoder().encode
    for page in pages:
        if page.headers or page.body or page.params or page.id or page.flaw:
            digest.update(encode(msgspec.structs.replace(page, line=0)))
        else:
            digest.update(f"{page.method} {page.url}\n".encode(errors="replace"))
    return digest.hexdigest()[:40]


def request_key(page: Page) -> tuple[str, str, bytes | None]:
    """Returns what makes two lines the same request."""
    return (page.method, page.url, page.body)


def count_flaws(pages: Sequence[Page]) -> int:
    return sum(page.flaw is not None for page in pages)
