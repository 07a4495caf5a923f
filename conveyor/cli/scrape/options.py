"""The options of a scrape that its folder remembers."""

from __future__ import annotations

from enum import StrEnum

import msgspec

TIMEOUT_S = 60.0


class PageFormat(StrEnum):
    """How pages are stored."""

    FILES = "files"
    JSONL = "jsonl"
    WARC = "warc"


class FixedOption(StrEnum):
    """Options that decide where pages are, so they cannot change for a folder with pages."""

    FORMAT = "format"
    NAME = "name"
    DEDUP = "dedup"


class ScrapeOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the caller may set and a resumed command need not repeat.

    An API key is not among them: it is never written to the disk.
    """

    concurrency: int = 100
    per_host: int | None = None
    rate: float | None = None
    attempts: int = 3
    timeout_s: float = TIMEOUT_S
    max_bytes: int | None = None
    headers: dict[str, str] = {}
    method: str | None = None
    data: bytes | None = None
    content_type: str | None = None
    params: dict[str, str] = {}
    accept_status: list[int] = []
    proxies: list[str] = []
    is_insecure: bool = False
    ignores_robots: bool = False
    dedup: bool = False
    name: str = "{index}"
    format: PageFormat = PageFormat.FILES
    budget: str | None = None
