"""The modelled AWS account: DynamoDB, SQS and S3, as a transport for any number of clients."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import trio

from conveyor.engines.aws.errors import AwsError, NoResponse
from conveyor.ports.clock import Clock
from conveyor.simulation.models.dynamodb import DynamoModel
from conveyor.simulation.models.fault_source import FaultSource
from conveyor.simulation.models.network import Network
from conveyor.simulation.models.s3 import S3Model
from conveyor.simulation.models.sqs import SqsModel

# A client gives up on a server that has sent nothing for this long.
SILENCE_S_MAX = 60.0
# The size of the pieces in which a body is read.
PIECE_BYTES = 256 * 1024

_BROKEN = partial(AwsError, "InternalServerError", "something broke", status=500)
_UNAVAILABLE = (
    _BROKEN,
    partial(AwsError, "ServiceUnavailable", "not now", status=503),
    partial(NoResponse, "no connection", was_sent=False),
)
_REFUSALS = {
    "dynamodb": (partial(AwsError, "ThrottlingException", "slow down"), *_UNAVAILABLE),
    "sqs": (partial(AwsError, "RequestThrottled", "slow down"), *_UNAVAILABLE),
    "s3": (partial(AwsError, "SlowDown", "slow down", status=503), *_UNAVAILABLE),
}
_LOSSES = (_BROKEN, partial(NoResponse, "the connection closed", was_sent=True))
_TOO_LATE = partial(NoResponse, "no answer before the deadline", was_sent=True)

Params = Mapping[str, Any]
Answer = dict[str, Any]


class Service(Protocol):
    """One modelled service. `run` applies an operation at one instant and returns its answer."""

    def run(self, operation: str, params: Params) -> Answer: ...


@dataclass(slots=True, kw_only=True)
class AwsModel:
    """Implements AwsTransport and Presigner. `clock` is that of the services; processes may have
    others."""

    clock: Clock
    fault_source: FaultSource
    dynamodb: DynamoModel = field(init=False)
    sqs: SqsModel = field(init=False)
    s3: S3Model = field(init=False)
    _services: dict[str, Service] = field(init=False)
    _network: Network = field(init=False)

    def __post_init__(self) -> None:
        self.dynamodb = DynamoModel(self.fault_source, self.clock.now)
        self.sqs = SqsModel(self.fault_source, self.clock.now)
        self.s3 = S3Model(self.fault_source, self.clock.now)
        self._services = {"dynamodb": self.dynamodb, "sqs": self.sqs, "s3": self.s3}
        self._network = Network(
            clock=self.clock, fault_source=self.fault_source, errors=(AwsError, NoResponse)
        )

    async def call(
        self, service: str, operation: str, params: Params, *, deadline_s: float
    ) -> Answer:
        body = params.get("Body")
        if body is not None and not isinstance(body, bytes):
            params = {**params, "Body": b"".join([piece async for piece in body])}
        slow_s = self._slow_s() if service == "s3" else 0.0
        waits_s = float(params.get("WaitTimeSeconds", 0))
        # A client does not wait longer than this for a silent server.
        patience_s = min(deadline_s, SILENCE_S_MAX + waits_s)
        return await self._network.send(
            self._network.draw_delay(patience_s, slow_s=slow_s),
            partial(self._services[service].run, operation, params),
            refusals=_REFUSALS[service],
            losses=_LOSSES,
            too_late=_TOO_LATE,
            wait=partial(self.sqs.poll, params) if waits_s else None,
        )

    @asynccontextmanager
    async def open(
        self, service: str, operation: str, params: Params, *, deadline_s: float
    ) -> AsyncGenerator[Answer, None]:
        answer = await self.call(service, operation, params, deadline_s=deadline_s)
        yield {**answer, "Body": self._pieces(answer.get("Body", b""))}

    async def presign(self, operation: str, params: Params, *, expires_s: int) -> str:
        """Implements Presigner; `s3.handle` answers requests to the URL."""
        await trio.lowlevel.checkpoint()
        return self.s3.presign(operation, params, expires_s=expires_s)

    def apply_late(self) -> None:
        """Applies the effects of calls whose callers gave up, if the requests have arrived by now.
        Every call does this first."""
        self._network.apply_late()

    def _slow_s(self) -> float:
        faults = self.fault_source.service_rates.s3
        is_slow = self.fault_source.occurs("s3.slow", faults.slow_rate)
        return self.fault_source.seconds(faults.slow_s) if is_slow else 0.0

    async def _pieces(self, body: bytes) -> AsyncGenerator[bytes, None]:
        """Yields the body in pieces; sometimes the connection breaks within it."""
        end = len(body) + 1
        if self.fault_source.occurs(
            "s3.broken_read", self.fault_source.service_rates.s3.broken_read_rate
        ):
            end = self.fault_source.below(len(body) + 1)
        for start in range(0, len(body), PIECE_BYTES):
            await trio.lowlevel.checkpoint()
            if piece := body[start : min(start + PIECE_BYTES, end)]:
                yield piece
        if end <= len(body):
            raise NoResponse("the connection closed in the middle of a body", was_sent=True)
