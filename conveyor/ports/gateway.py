"""Gateway: fetches one URL and answers with a value, even when the site fails
(docs/engines.md, Gateways)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Protocol

import msgspec

from conveyor.domain.backpressure.budget import Price
from conveyor.domain.model import FailureReason, Method, Problem, RunFailure
from conveyor.domain.run.wait_reason import WaitReason


class ScrapeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One fetch, with job and task parameters merged and secrets opened.

    `auth` is the caller's API key, for gateways that want one. `identity` names the task and
    attempt: the same work asked for twice carries the same identity. `partition` names the caller:
    requests of two callers share no connection, no session and no allowance.
    """

    url: str
    method: Method
    params: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes | None
    body_content_type: str | None
    auth: str | None
    identity: str
    partition: str
    deadline_s: float
    body_bytes_max: int


class Contact(Enum):
    """What a call tells about the gateway that it was made to."""

    ANSWERED = "it works: the answer is about the target or the caller"
    REFUSED = "it works, and takes no more calls of this key for now"
    FAILED = "it was called and gave no answer, or one that is not about the target"
    UNREACHABLE = "the call could not be sent"


class GatewayReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a call to a remote gateway tells about the gateway itself. `limit` and `remaining` are
    what it states about the calls that one key may have under way, as far as that can be true."""

    contact: Contact
    limit: int | None = None
    remaining: int | None = None
    retry_after_s: float | None = None


class Scraped(msgspec.Struct, frozen=True, kw_only=True):
    """The site (or the gateway for it) answered with a page that counts as a success.

    Where `cost_known` is false it may have cost anything up to its price. `report` is there when a
    remote gateway was called.
    """

    status: int
    content_type: str
    body: bytes
    credits: int = 0
    cost_micros: int = 0
    cost_known: bool = True
    report: GatewayReport | None = None


class NotScraped(msgspec.Struct, frozen=True, kw_only=True):
    """There is no page. `retryable` says whether another try could help.

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
    task's: the task waits, and no attempt is counted.

    `reason` is what it waits for. Without `retry_after_s` the task comes back after the usual
    delay of a message that was put back.
    """

    reason: WaitReason
    detail: str
    retry_after_s: float | None = None
    credits: int = 0
    cost_micros: int = 0
    cost_known: bool = True


Outcome = Scraped | NotScraped | Deferred


class Gateway(Protocol):
    """Laws:

    - The outcome is a value: no error of the site, the network or the gateway is raised.
    - An error of this process is `Deferred`. One that may be the remote gateway's is `NotScraped`
      with a report that says so: the limiter of its calls decides whose it is.
    - A call ends within `deadline_s`, with `timeout` as its reason when it ran out.
    - No body larger than `body_bytes_max`, decoded, is returned or held.
    - Cancelling a call closes its connection promptly.
    - No call costs more than `price` says for its parameters.
    """

    def price(self, params: Mapping[str, str]) -> Price:
        """The most that one call with these parameters may cost."""

    async def scrape(self, request: ScrapeRequest) -> Outcome: ...
