"""Records what clients, sites and receivers observed: calls with their answers, fetches and webhook
deliveries (docs/simulator.md)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class Call:
    """One request of a client. `status` is None while, and if, the client received no complete
    answer."""

    number: int
    tenant: str
    method: str
    path: str
    key: str | None
    body: bytes
    sent_at: float
    answered_at: float | None = None
    status: int | None = None
    answer: bytes = b""
    media_type: str = ""

    @property
    def is_accepted(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    @property
    def route(self) -> str:
        """The path without its query string."""
        return self.path.partition("?")[0]

    @property
    def json(self) -> Any:
        return json.loads(self.answer)


@dataclass(slots=True, kw_only=True)
class Fetch:
    """One call of the gateway for a task, under a claim.

    `outcome` is the class name of the outcome, empty until there is one. `credits_billed` is what
    the gateway charged. `site_faults` counts failures of the site, `outage_faults` those of a
    gateway that refused the call. `is_at_gateway` is True once the gateway has accepted the call.
    """

    process: str
    run_id: str
    task_id: str
    claim_id: str
    started_at: float
    ended_at: float | None = None
    outcome: str = ""
    credits_billed: int = 0
    price_credits: int = 1
    site_faults: int = 0
    outage_faults: int = 0
    is_at_gateway: bool = False

    @property
    def identity(self) -> str:
        """Identifies the task and the attempt; the worker sends it with the request."""
        return f"{self.run_id}-{self.task_id}-{self.claim_id}"

    @property
    def claim(self) -> int:
        """The number of the claim. It is 0 for a first delivery, for which no claim was written."""
        return int(self.claim_id.partition(".")[0])


CURRENT_FETCH: ContextVar[Fetch | None] = ContextVar("CURRENT_FETCH", default=None)
"""The fetch of the current Trio task. The fake internet reads it to know which task a request
belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayRefusal:
    """A call that the gateway refused because its key already had `limit` calls in flight."""

    key: str
    at: float
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One attempt to deliver a webhook, as its receiver saw it. `status` is None if it did not
    answer."""

    event_id: str
    url: str
    body: bytes
    headers: dict[str, str]
    at: float
    status: int | None


@dataclass(slots=True, kw_only=True)
class AcceptedRequest:
    """A job that the API accepted: how many lines it has, and the run that the first answer
    named."""

    tenant: str
    job_id: str
    run_id: str | None
    lines_count: int
    is_open: bool = False
    is_scheduled: bool = False


@dataclass(slots=True)
class History:
    """Everything that was observed so far, and the facts about the world that checkers depend on.

    `is_fault_free`: no faults of engines, processes and clocks. `is_isolated`: only the special
    conditions of the world disturb it (environment/conditions.py). `released` has the names of the
    leases that their holders gave back. `sees_leases`: the monitor sees every change of a lease,
    and lease times can be compared. `crash_injected_at` are the instants at which a crash of an
    actor was injected. `idle_since` says for each idle run since when it has been idle. `sweep_s`
    is the period of the sweeper, `scan_s` how long a new run may wait until a worker scans for it.
    """

    calls: list[Call] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)
    gateway_refusals: list[GatewayRefusal] = field(default_factory=list)
    accepted_requests: dict[str, AcceptedRequest] = field(default_factory=dict)
    deleted_jobs: dict[str, float] = field(default_factory=dict)
    stopped_runs: dict[str, float] = field(default_factory=dict)
    signing_secrets: dict[str, list[bytes | None]] = field(default_factory=dict)
    uploads: list[tuple[str, bytes]] = field(default_factory=list)
    paged_runs: list[tuple[str, list[str]]] = field(default_factory=list)
    released: set[str] = field(default_factory=set)
    logged: list[str] = field(default_factory=list)
    crash_injected_at: list[float] = field(default_factory=list)
    idle_since: dict[str, float] = field(default_factory=dict)
    calm_since: float | None = None
    sweep_s: float = 0.0
    scan_s: float = 0.0
    kills_count: int = 0
    spent_count: int = 0
    is_fault_free: bool = False
    sees_leases: bool = True
    steps_clocks: bool = False
    workers_count: int = 1
    is_isolated: bool = False
    gateway_lies: bool = False
    gateway_outages: int = 0
    gateway_away_s: float = 0.0
    has_gateway: bool = False
    has_wrong_clocks: bool = False
    leaps_days: bool = False
    quotas: dict[str, int] = field(default_factory=dict)
    small_jobs: list[str] = field(default_factory=list)

    @property
    def is_undisturbed(self) -> bool:
        """Whether nothing happened to processes and engines that could cost time or a page."""
        return (self.is_fault_free or self.is_isolated) and not self.kills_count

    def note_idle(self, run_ids: Iterable[str], at: float) -> None:
        """Notes which runs are idle now. A run that was idle before keeps the instant since
        when."""
        self.idle_since = {run_id: self.idle_since.get(run_id, at) for run_id in run_ids}

    def answered(self) -> Iterator[Call]:
        return (call for call in self.calls if call.status is not None)

    def in_flight(self) -> Iterator[Fetch]:
        return (fetch for fetch in self.fetches if fetch.ended_at is None)
