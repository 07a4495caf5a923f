"""WebhookSender and WorkflowCallback: deliver the events of runs to their receivers (SPEC.md
4.16)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from conveyor.domain.model import Webhook
from conveyor.domain.webhook import Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One event to deliver. `secrets` sign it, the active one first; without any it is unsigned.
    `partition` names the caller: deliveries for two callers share no connection."""

    event_id: str
    payload: str
    webhook: Webhook
    partition: str
    secrets: tuple[Secret, ...] = ()


class Delivered(msgspec.Struct, frozen=True):
    status: int


class NotDelivered(msgspec.Struct, frozen=True):
    """`error` is one of the error codes of docs/api.md; `gone` means that the receiver wants no
    further attempts."""

    error: str
    # None if there was no response.
    status: int | None = None
    retry_after_s: float | None = None
    gone: bool = False


class Unresolved(msgspec.Struct, frozen=True):
    """The receiver's host name has no address to which Conveyor may post. `is_temporary` is True if
    a later attempt may succeed."""

    is_temporary: bool


class WebhookSender(Protocol):
    """Laws:

    - Delivering twice is safe: every attempt of one event has the same event id and bytes.
    - The outcome is a value; a call ends within 15 seconds; no redirect is followed.
    - Unavailable is raised if this process could not make the call: then there was no attempt.
    """

    async def deliver(self, message: Message) -> Delivered | NotDelivered: ...

    async def resolve(self, webhook: Webhook, partition: str) -> Unresolved | None:
        """Returns None if the receiver's host name has an address to which Conveyor may post. Ends
        within a second, and sends nothing to the receiver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Callback:
    """The end of a run, for the one task of a state machine that waits for it."""

    # The token is a credential, so it must not appear in logs.
    token: str = field(repr=False)
    is_success: bool
    event_type: str
    payload: str


class WorkflowCallback(Protocol):
    """Laws:

    - Calling back twice is safe: a task ends once, and a later call is refused as `gone`.
    - The outcome is a value; a call ends within 15 seconds.
    """

    async def call_back(self, callback: Callback) -> Delivered | NotDelivered: ...
