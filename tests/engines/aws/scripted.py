"""A transport with scripted answers that records the calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from conveyor.engines.aws.errors import AwsError, NoResponse

ScriptedAnswer = dict[str, Any] | AwsError | NoResponse

THROTTLED = AwsError("ThrottlingException", "slow down")
LOST = NoResponse("the connection closed", was_sent=True)
UNSENT = NoResponse("connection refused", was_sent=False)


class ScriptedTransport:
    """Gives its answers in order, and the last one for every later call."""

    def __init__(self, *lines: ScriptedAnswer) -> None:
        self._lines = list(lines)
        self.asked: list[tuple[str, str, Mapping[str, Any]]] = []

    async def call(
        self, service: str, operation: str, params: Mapping[str, Any], *, deadline_s: float
    ) -> dict[str, Any]:
        self.asked.append((service, operation, params))
        line = self._lines.pop(0) if len(self._lines) > 1 else self._lines[0]
        if isinstance(line, AwsError | NoResponse):
            raise line
        return line

    @asynccontextmanager
    async def open(
        self, service: str, operation: str, params: Mapping[str, Any], *, deadline_s: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        yield await self.call(service, operation, params, deadline_s=deadline_s)
