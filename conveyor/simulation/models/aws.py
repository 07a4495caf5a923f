"""AwsModel: DynamoDB, SQS and S3 of one world, as a plane that any number of seams may stand on.

An effect happens at one instant, on its way between a request and an answer that both take time,
or get lost. What is still under way when its caller gives up takes effect all the same.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Protocol

import trio

from conveyor.engines.aws.errors import AwsError, NoAnswer
from conveyor.ports.clock import Clock
from conveyor.simulation.models.dynamodb import DynamoModel
from conveyor.simulation.models.fate import Fate
from conveyor.simulation.models.s3 import S3Model
from conveyor.simulation.models.sqs import SqsModel

SILENCE_S_MAX = 60.0
PIECE_BYTES = 256 * 1024

_THROTTLES = {"dynamodb": "ThrottlingException", "sqs": "RequestThrottled", "s3": "SlowDown"}

Params = Mapping[str, Any]
Answer = dict[str, Any]


class Service(Protocol):
    def do(self, operation: str, params: Params) -> Answer: ...


@dataclass(slots=True, kw_only=True)
class AwsModel:
    """See Plane. `clock` is the services' own; processes may have others."""

    clock: Clock
    fate: Fate
    dynamodb: DynamoModel = field(init=False)
    sqs: SqsModel = field(init=False)
    s3: S3Model = field(init=False)
    _services: dict[str, Service] = field(init=False)
    _late: list[tuple[float, int, str, str, Params]] = field(default_factory=list)
    _number: int = 0

    def __post_init__(self) -> None:
        self.dynamodb = DynamoModel(self.fate, self.clock.now)
        self.sqs = SqsModel(self.fate, self.clock.now)
        self.s3 = S3Model(self.fate, self.clock.now)
        self._services = {"dynamodb": self.dynamodb, "sqs": self.sqs, "s3": self.s3}

    async def call(
        self, service: str, operation: str, params: Params, *, deadline_s: float
    ) -> Answer:
        body = params.get("Body")
        if body is not None and not isinstance(body, bytes):
            params = {**params, "Body": b"".join([piece async for piece in body])}
        await trio.lowlevel.checkpoint()
        self.land()
        return await self._travel(service, operation, params, min(deadline_s, _patience_s(params)))

    @asynccontextmanager
    async def open(
        self, service: str, operation: str, params: Params, *, deadline_s: float
    ) -> AsyncGenerator[Answer, None]:
        answer = await self.call(service, operation, params, deadline_s=deadline_s)
        yield {**answer, "Body": self._pieces(answer.get("Body", b""))}

    async def presign(self, operation: str, params: Params, *, expires_s: int) -> str:
        """See Presigner; the URL is answered by `s3.handle`."""
        await trio.lowlevel.checkpoint()
        return self.s3.presign(operation, params, expires_s=expires_s)

    def land(self) -> None:
        """Does what was under way when its caller gave up, as far as it has arrived."""
        while self._late and self._late[0][0] <= self.clock.now():
            _, _, service, operation, params = heappop(self._late)
            with suppress(AwsError, NoAnswer):  # Nobody listens any more.
                self._services[service].do(operation, params)

    async def _travel(
        self, service: str, operation: str, params: Params, patience_s: float
    ) -> Answer:
        ends_at = trio.current_time() + patience_s
        there_s, back_s = self._delays(service, patience_s)
        if there_s >= patience_s:
            self._number += 1
            arrival = self.clock.now() + there_s
            heappush(self._late, (arrival, self._number, service, operation, params))
        await _wait(there_s, ends_at)
        faults = self.fate.pessimism.calls
        if self.fate.strikes("call.refused", faults.refused_rate):
            raise self._refusal(service)
        answer = await self._do(service, operation, params)
        await _wait(back_s, ends_at)
        if self.fate.strikes("call.lost", faults.lost_rate):
            raise self._loss()
        return answer

    def _delays(self, service: str, patience_s: float) -> tuple[float, float]:
        """How long the request takes, and how long the answer does."""
        fate, faults = self.fate, self.fate.pessimism.calls
        there_s, back_s = fate.seconds(faults.latency_s) / 2, fate.seconds(faults.latency_s) / 2
        if fate.strikes("call.slow", faults.slow_rate):
            slow_s, share = fate.seconds(faults.slow_s), fate.seconds((0.0, 1.0))
            there_s, back_s = there_s + share * slow_s, back_s + (1 - share) * slow_s
        if service == "s3" and fate.strikes("s3.slow", fate.pessimism.s3.slow_rate):
            back_s += fate.seconds(fate.pessimism.s3.slow_s)
        if fate.strikes("call.stalled", faults.stalled_rate):
            back_s += max(patience_s, fate.seconds(faults.stalled_s))
        if fate.strikes("call.late", faults.late_rate):
            there_s += patience_s + fate.seconds(faults.late_s)
        return there_s, back_s

    async def _do(self, service: str, operation: str, params: Params) -> Answer:
        if service not in self._services:
            raise ValueError(f"there is no model of {service}")
        if operation == "ReceiveMessage" and params.get("WaitTimeSeconds"):
            return await self.sqs.poll(params)
        return self._services[service].do(operation, params)

    def _refusal(self, service: str) -> AwsError | NoAnswer:
        """Nothing was done, whatever it sounds like."""
        refusals: list[AwsError | NoAnswer] = [
            AwsError(_THROTTLES[service], "slow down", status=400 if service != "s3" else 503),
            AwsError("InternalServerError", "something broke", status=500),
            AwsError("ServiceUnavailable", "not now", status=503),
            NoAnswer("no connection", was_sent=False),
        ]
        return self.fate.one_of(refusals)

    def _loss(self) -> AwsError | NoAnswer:
        losses: list[AwsError | NoAnswer] = [
            NoAnswer("the connection closed", was_sent=True),
            AwsError("InternalServerError", "something broke", status=500),
        ]
        return self.fate.one_of(losses)

    async def _pieces(self, body: bytes) -> AsyncIterator[bytes]:
        """The body; now and then the connection breaks somewhere in it."""
        end = len(body) + 1
        if self.fate.strikes("s3.broken_read", self.fate.pessimism.s3.broken_read_rate):
            end = self.fate.below(len(body) + 1)
        for start in range(0, len(body), PIECE_BYTES):
            await trio.lowlevel.checkpoint()
            if piece := body[start : min(start + PIECE_BYTES, end)]:
                yield piece
        if end <= len(body):
            raise NoAnswer("the connection closed in the middle of a body", was_sent=True)


def _patience_s(params: Params) -> float:
    """No client listens for ever to a server that says nothing."""
    return SILENCE_S_MAX + float(params.get("WaitTimeSeconds", 0))


async def _wait(seconds: float, ends_at: float) -> None:
    left_s = ends_at - trio.current_time()
    if seconds < left_s:
        if seconds:
            await trio.sleep(seconds)
        return
    await trio.sleep(max(0.0, left_s))
    raise NoAnswer("no answer before the deadline", was_sent=True)
