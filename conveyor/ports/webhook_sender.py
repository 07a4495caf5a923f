"""Notifier and Workflows: tell those who wait that something happened (SPEC.md 4.16)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from conveyor.domain.model import Webhook
from conveyor.domain.webhook.signature import Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One event on its way. `secrets` sign it, the active one first; without any it is unsigned.
    `partition` names the caller: deliveries for two callers share no connection.
    """

    event_id: str
    payload: str
    webhook: Webhook
    partition: str
    secrets: tuple[Secret, ...] = ()


class Delivered(msgspec.Struct, frozen=True):
    status: int


class NotDelivered(msgspec.Struct, frozen=True):
    """`error` is one of the contract's words; `gone` means that the receiver wants no more."""

    error: str
    status: int | None = None
    retry_after_s: float | None = None
    gone: bool = False


class Unresolved(msgspec.Struct, frozen=True):
    """The receiver's name leads nowhere that we may go; `is_temporary` if it may do so soon."""

    is_temporary: bool


class WebhookSender(Protocol):
    """Laws:

    - Delivering twice is safe: every try of one event carries the same event id and bytes.
    - The outcome is a value; a call ends within 15 seconds; no redirect is followed.
    - Unavailable is raised when this process itself could not make the call: no try was made.
    """

    async def deliver(self, message: Message) -> Delivered | NotDelivered: ...

    async def resolve(self, webhook: Webhook, partition: str) -> Unresolved | None:
        """Whether the receiver's name has an address that we may post to: None if so. Ends within
        a second, and nothing is sent to the receiver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Callback:
    """The end of a run, for the one task of a state machine that waits for it."""

    token: str = field(repr=False)
    is_success: bool
    event_type: str
    payload: str


class WorkflowCallback(Protocol):
    """Laws:

    - Calling back twice is safe: a task ends once, and any later call is refused as `gone`.
    - The outcome is a value; a call ends within 15 seconds.
    """

    async def call_back(self, callback: Callback) -> Delivered | NotDelivered: ...
