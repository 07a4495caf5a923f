"""Recorded pages in a compact form: what a site answered, and the verdict on it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from conveyor.gateway.verdicts import Verdict
from conveyor.ports.gateway import Page

_FOLDER = Path(__file__).parent
_PARAGRAPH = (
    "<p>The mill stands where the two streams meet, and has been worked by the same family for "
    "five generations. Visitors are shown the wheel, the stones and the loft, and may buy flour on "
    "the day that it was ground. In winter the path is closed after heavy snow.</p>"
)


class Recorded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    html: str
    verdict: Verdict | None = None
    status: int = 200
    headers: dict[str, str] = {}
    url: str = "https://www.example.com/some/page"
    content_type: str = "text/html; charset=utf-8"
    #: In which the page is sent.
    charset: str = "utf-8"
    #: How often the paragraph of prose stands for `{text}`.
    paragraphs: int = 0
    #: Characters that stand for `{data}`.
    data_chars: int = 0

    def to_page(self) -> Page:
        html = self.html.replace("{text}", _PARAGRAPH * self.paragraphs)
        return Page(
            url=self.url,
            status=self.status,
            headers=self.headers,
            content_type=self.content_type,
            body=html.replace("{data}", "x" * self.data_chars).encode(self.charset),
        )


class _File(msgspec.Struct, frozen=True):
    pages: list[Recorded]


def read_recorded(name: str) -> list[Recorded]:
    return msgspec.toml.decode((_FOLDER / f"{name}.toml").read_bytes(), type=_File).pages


NO_CONTENT = read_recorded("no_content")
CONTENT = read_recorded("content")
