"""Gateway: fetches one URL and returns a value, even when the site fails (docs/engines.md,
Gateways)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Protocol

import msgspec

from conveyor.domain.budget import Price
from conveyor.domain.model import FailureReason, Problem, RunFailure
from conveyor.domain.run.wait_reason import WaitReason


class PageMemory:
    """The memory that a gateway reserved for the body of a page. It is reserved until the caller
    calls `release`, which it does when it has stored or dropped the body."""

    __slots__ = ("_release",)

    def __init__(self) -> None:
        self._release: Callable[[], None] | None = None

    def hold(self, release: Callable[[], None]) -> None:
        """The gateway calls it at most once for a call. `release` returns the memory."""
        assert self._release is None
        self._release = release

    def release(self) -> None:
        """Safe to repeat."""
        release, self._release = self._release, None
        if release is not None:
            release()


OWN_PROBLEMS = "urn:conveyor:fetch:"
"""The types of the problems of our own gateway begin with this: their details are for callers."""


class ScrapeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One fetch, with merged job and task parameters and unsealed secrets.

    `auth` is the caller's API key, for gateways that need one. `identity` names the task and the
    attempt: the same request sent twice has the same identity. `partition` names the caller:
    requests of two callers share no connection, no session and no quota. With `memory`, a body
    counts as in memory until the caller releases it; without, until the call ends. Every gateway
    takes the methods of `Method`. A direct fetch also takes the other methods of the HTTP client.
    """

    url: str
    method: str
    params: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes | None
    body_content_type: str | None
    auth: str | None
    identity: str
    partition: str
    deadline_s: float
    body_bytes_max: int
    memory: PageMemory | None = None


class Contact(Enum):
    """What a call proves about the gateway to which it was made."""

    ANSWERED = "it works: the answer is about the target or the caller"
    REFUSED = "it works, and takes no more calls of this key for now"
    FAILED = "it was called and gave no answer, or one that is not about the target"
    UNREACHABLE = "the call could not be sent"


class GatewayReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a call to a remote gateway shows about the gateway itself. `limit` and `remaining` are
    what the gateway states about the concurrent calls of one key, if the values are plausible."""

    contact: Contact
    limit: int | None = None
    remaining: int | None = None
    retry_after_s: float | None = None


class Scraped(msgspec.Struct, frozen=True, kw_only=True):
    """The site, or the gateway for it, returned a page that counts as a success.

    If `cost_known` is False, the call may have cost anything up to its price. `report` is set if a
    remote gateway was called. `final_url` is set if redirects led to another URL.
    """

    status: int
    content_type: str
    body: bytes
    final_url: str | None = None
    credits: int = 0
    cost_micros: int = 0
    cost_known: bool = True
    report: GatewayReport | None = None


class NotScraped(msgspec.Struct, frozen=True, kw_only=True):
    """There is no page. `retryable` states whether another attempt could help.

    `run_failure` is set for account-level errors: no other task of the run can succeed either.
    """

    reason: FailureReason
    problem: Problem
    retryable: bool
    retry_after_s: float | None = None
    run_failure: RunFailure | None = None
    credits: int = 0
    cost_micros: int = 0
    cost_known: bool = True
    report: GatewayReport | None = None


class Deferred(msgspec.Struct, frozen=True, kw_only=True):
    """The call was not made, or was refused, for a reason that is neither the site's nor the
    task's. The task waits, and no attempt is counted.

    `reason` is what it waits for. Without `retry_after_s` the task returns after the usual delay of
    a bounced message.
    """

    reason: WaitReason
    detail: str
    retry_after_s: float | None = None
    # A refused call may have cost something, which counts although no attempt does.
    credits: int = 0
    cost_micros: int = 0
    cost_known: bool = True


Outcome = Scraped | NotScraped | Deferred


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """What a site answered, before it is judged. The names of headers are in lower case. `url` is
    that of the last redirect. The body of a rendered page is its document after its scripts."""

    url: str
    status: int
    headers: Mapping[str, str]
    content_type: str
    body: bytes
    is_rendered: bool = False


class PageProcessor(Protocol):
    """Decides whether what a site answered is a page, and makes the document that the parameters
    ask for. Laws:

    - What it cannot do for these parameters it names, and never ignores.
    - It ends within `deadline_s` and holds a bounded amount of memory, whatever the page contains.
    """

    def find_unsupported(self, params: Mapping[str, str]) -> list[str]:
        """Returns the parameters that a gateway with this processor does not honour."""

    def judge(self, page: Page) -> NotScraped | None:
        """Returns the failure if the answer is recognised as no page. Its body may be missing."""

    async def process(
        self, params: Mapping[str, str], page: Page, *, bytes_max: int, deadline_s: float
    ) -> Scraped | NotScraped:
        """Returns the document for a page with a status that counts as a success."""


class Gateway(Protocol):
    """Laws:

    - The outcome is a value: no error of the site, the network or the gateway is raised.
    - An error of this process is `Deferred`. An error that may be the remote gateway's is
      `NotScraped` with a report of it: the call limiter decides whether the gateway or the target
      is at fault.
    - A call ends within `deadline_s`; if the time runs out, the reason is `timeout`.
    - No body larger than `body_bytes_max`, decoded, is returned or held.
    - Cancelling a call closes its connection promptly.
    - No call costs more than `price` returns for its parameters.
    """

    def price(self, params: Mapping[str, str]) -> Price:
        """Returns the most that one call with these parameters may cost."""

    async def scrape(self, request: ScrapeRequest) -> Outcome: ...
