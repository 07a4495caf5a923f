"""Page: what came back for one URL, from a plain fetch or from a browser
(docs/gateway.md, Answers)."""

from __future__ import annotations

from typing import Any

import msgspec

from conveyor.http_client.exchange import plausible_content_type


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """A response of a site, with any status.

    `url` is where redirects led. `headers` have names in lower case. `report` is what a browser
    observed; it is None for a plain fetch. `html` is the page of which `body` is a picture or a
    PDF. `site_type` is the type that the site stated, if a browser made HTML of its answer.
    """

    url: str
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    report: RenderReport | None = None
    html: bytes | None = None
    site_type: str | None = None

    @property
    def site_headers(self) -> tuple[tuple[str, str], ...]:
        """The headers as the site sent them."""
        if self.site_type is None:
            return self.headers
        others = tuple(pair for pair in self.headers if pair[0] != "content-type")
        return (("content-type", self.site_type), *others) if self.site_type else others

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    @property
    def content_type(self) -> str:
        return plausible_content_type(self.header("content-type"), self.body)


class RenderReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `json_response` contains besides the HTML."""

    xhr: list[dict[str, Any]]
    instructions: dict[str, Any] | None = None
    screenshot: dict[str, Any] | None = None
