"""A paid gateway with a concurrency limit: it charges a credit a page and refuses calls beyond it.

It may be down, fail for some targets, report another limit than it has, and respond slowly. It
completes a call even if the caller closes the connection. It implements the fetch API of ZenRows:
the key and the target URL are in the query, the price and the state of the plan in response
headers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from tests.attack.origin import Request, Site

THINK_S = 0.2


@dataclass(slots=True)
class PaidGateway(Site):
    plan: int | None = None
    is_down: bool = False
    think_s: float = THINK_S
    poisoned: frozenset[str] = frozenset()
    states: Callable[[int, int], tuple[str, str]] = lambda plan, remaining: (
        str(plan),
        str(remaining),
    )
    retry_after: str | None = None
    # What each page begins with.
    prologue: bytes = b""
    paid_for: Counter[str] = field(default_factory=Counter)
    paid_count: int = 0
    refused_count: int = 0
    working_count: int = 0
    working_count_max: int = 0

    async def _behave(self, name: str, request: Request, stream: trio.SocketStream) -> bool:
        if self.is_down or request.query["url"] in self.poisoned:
            await stream.send_all(self._answer_with("503 Service Unavailable", b"away"))
            return True
        if self.plan is not None and self.working_count >= self.plan:
            self.refused_count += 1
            problem = b'{"code":"AUTH006","title":"Too many concurrent requests","status":429}'
            await stream.send_all(self._answer_with("429 Too Many Requests", problem))
            return True
        self.working_count += 1
        self.working_count_max = max(self.working_count_max, self.working_count)
        try:
            await trio.sleep(self.think_s)
            self.paid_count += 1
            self.paid_for[request.query["url"]] += 1
        finally:
            self.working_count -= 1
        page = self.prologue + f"<h1>the page {request.query['url']}</h1>".encode()
        await stream.send_all(self._answer_with("200 OK", page))
        return True

    def _answer_with(self, status: str, body: bytes) -> bytes:
        lines = [
            f"HTTP/1.1 {status}",
            "Content-Type: text/html" if status == "200 OK" else "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "X-Request-Cost: 1",
        ]
        if self.plan is not None:
            limit, remaining = self.states(self.plan, max(0, self.plan - self.working_count))
            lines += [f"Concurrency-Limit: {limit}", f"Concurrency-Remaining: {remaining}"]
        if self.retry_after is not None and status.startswith("429"):
            lines.append(f"Retry-After: {self.retry_after}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
