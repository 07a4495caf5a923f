"""Notifier: tells a customer's receiver that something happened (SPEC 6.6)."""

from __future__ import annotations

from typing import Protocol

import msgspec

from conveyor.domain.model import Notice, Webhook


class Delivered(msgspec.Struct, frozen=True):
    status: int


class NotDelivered(msgspec.Struct, frozen=True):
    """`error` is one of the contract's words; `gone` means that the receiver wants no more."""

    error: str
    status: int | None = None
    retry_after_s: float | None = None
    gone: bool = False


class Notifier(Protocol):
    """Laws:

    - Delivering twice is safe: every try of one notice carries the same event id and bytes.
    - The outcome is a value; a call ends within 15 seconds; no redirect is followed.
    """

    async def deliver(self, notice: Notice, webhook: Webhook) -> Delivered | NotDelivered: ...
