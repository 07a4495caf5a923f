"""Gateway: fetches one URL and answers with a value, even when the site fails (SPEC 6.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from conveyor.domain.budget import Price
from conveyor.domain.model import FailureReason, Method, Problem, RunFailure


class ScrapeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One fetch, with job and task parameters merged and secrets opened.

    `auth` is the caller's API key, for gateways that want one. `identity` names the task and
    attempt: the same work asked for twice carries the same identity.
    """

    url: str
    method: Method
    params: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes | None
    body_content_type: str | None
    auth: str | None
    identity: str
    deadline_s: float
    body_bytes_max: int


class Scraped(msgspec.Struct, frozen=True, kw_only=True):
    """The site (or the gateway for it) answered with a page that counts as a success.

    Where `cost_known` is false it may have cost anything up to its price.
    """

    status: int
    content_type: str
    body: bytes
    credits: int = 0
    cost_micros: int = 0
    cost_known: bool = True


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


Outcome = Scraped | NotScraped


class Gateway(Protocol):
    """Laws:

    - The outcome is a value: no error of the site, the network or the gateway is raised.
    - A call ends within `deadline_s`, with `timeout` as its reason when it ran out.
    - No body larger than `body_bytes_max`, decoded, is returned or held.
    - Cancelling a call closes its connection promptly.
    - No call costs more than `price` says for its parameters.
    """

    def price(self, params: Mapping[str, str]) -> Price:
        """The most that one call with these parameters may cost."""

    async def scrape(self, request: ScrapeRequest) -> Outcome: ...
