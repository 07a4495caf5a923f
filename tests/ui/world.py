"""A dashboard with its ports, and browsers that visit it without scripts."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from prometheus_client import CollectorRegistry
from quart.testing.utils import sentinel
from werkzeug.datastructures import Headers

from conveyor.api.server.app import make_app
from conveyor.api.server.auth import Authenticator, Passthrough
from conveyor.telemetry import make_metrics
from conveyor.ui.access import COOKIE, AccessRules
from conveyor.ui.dashboard import Dashboard
from tests.api.world import ANNA, SECRET, World, make_world

ADMIN = "an-operators-key"
WATCH = "a-watchers-key-1"
_TOKEN = re.compile(r'name="token" value="([^"]+)"')


@dataclass(frozen=True, slots=True)
class Answer:
    """The response that a browser receives."""

    status: int
    headers: Headers
    text: str

    @property
    def location(self) -> str:
        return self.headers["Location"]

    @property
    def words(self) -> str:
        """The visible text of the page."""
        return html.unescape(re.sub(r"<[^>]+>", " ", self.text))


@dataclass(slots=True)
class Browser:
    """A browser that keeps its cookie and sends the token of the last page with every form."""

    world: World
    cookie: str | None = None
    token: str = ""
    peer: str = "203.0.113.9"
    host: str = "scrape.example"
    more: dict[str, str] = field(default_factory=dict)

    async def open(self, path: str, *, data: bytes | None = None, kind: str = "") -> Answer:
        headers = {"Host": self.host, **self.more}
        if self.cookie is not None:
            headers["Cookie"] = f"{COOKIE}={self.cookie}"
        if data is not None:
            headers["Content-Type"] = kind or "application/x-www-form-urlencoded"
        client = self.world.app.test_client(use_cookies=False)
        response = await client.open(
            path,
            method="GET" if data is None else "POST",
            headers=Headers(headers),
            data=data,
            json=sentinel,
            scope_base={"raw_path": path.partition("?")[0].encode(), "client": (self.peer, 1)},
        )
        content = await response.get_data(as_text=False)
        answer = Answer(response.status_code, response.headers, content.decode(errors="replace"))
        given = response.headers.get("Set-Cookie", "")
        if given.startswith(f"{COOKIE}="):
            self.cookie = given.partition("=")[2].partition(";")[0] or None
        if found := _TOKEN.search(answer.text):
            self.token = html.unescape(found[1])
        return answer

    async def send(self, path: str, fields: Mapping[str, str] | None = None) -> Answer:
        """Sends a form with the token of the last page."""
        body = urlencode({"token": self.token, **(fields or {})}).encode()
        return await self.open(path, data=body)

    async def sign_in(self, key: str = ANNA, **fields: str) -> Answer:
        await self.open("/ui/signin")
        return await self.send("/ui/signin", {"key": key, **fields})


def make_ui_world(
    *,
    rules: AccessRules = AccessRules(admin_key=ADMIN, viewer_key=WATCH),  # noqa: B008
    auth: Authenticator | None = None,
    dashboard: Dashboard | None = None,
    **config: Any,
) -> World:
    world = make_world(**config)
    world.app = make_app(
        world.env,
        auth or Passthrough(SECRET),
        notifier=world.receiver,
        metrics=make_metrics(CollectorRegistry()),
        ready=lambda: world.is_ready[0],
        mount=(dashboard or Dashboard(rules=rules)).mount,
    )
    return world
