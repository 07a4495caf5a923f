"""A modelled SQS in which a test can make single calls fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

from conveyor.engines.aws.client.client import Answer, Params
from conveyor.engines.aws.errors import AwsError
from conveyor.ports.clock import Clock
from conveyor.simulation.models import CALM, AwsModel, FaultRates, FaultSource
from conveyor.simulation.models.fault_rates import SqsFaults
from conveyor.simulation.models.sqs import URL

__all__ = ["URL", "FaultySqs"]


@dataclass(slots=True)
class FaultySqs:
    """`unseen`, `empty` and `twice` are numbers of faults to come: queues that are not visible
    after their creation, receives that return nothing, and receives that do not hide their
    messages.

    `short` states how many entries of each of the next batches are refused, and `why`. Queues in
    `broken` do not work. `after_receive` is called between a receive and its answer."""

    clock: Clock
    unseen: int = 0
    empty: int = 0
    twice: int = 0
    short: list[int] = field(default_factory=list)
    why: tuple[str, bool] = ("InternalError", False)
    broken: set[str] = field(default_factory=set)
    calls: Counter[str] = field(default_factory=Counter)
    after_receive: Callable[[], None] = lambda: None
    model: AwsModel = field(init=False)

    def __post_init__(self) -> None:
        self.model = AwsModel(clock=self.clock, fault_source=FaultSource(random=Random(1)))

    @property
    def bodies(self) -> dict[str, list[str]]:
        queues = self.model.sqs.queues
        return {url: [message.body for message in queues[url].messages.values()] for url in queues}

    async def call(
        self, service: str, operation: str, params: Params, *, deadline_s: float
    ) -> Answer:
        self.calls[operation] += 1
        if params.get("QueueUrl") in self.broken:
            raise AwsError("ServiceUnavailable", "not now", status=503)
        if self.unseen and operation not in {"CreateQueue", "GetQueueUrl"}:
            self.unseen -= 1
            raise AwsError("QueueDoesNotExist", "no such queue")
        if operation == "ReceiveMessage":
            self.model.fault_source.service_rates = self._current_faults()
        refused: list[Answer] = []
        if "Entries" in params:
            params, refused = self._shorten(params)
        if params.get("Entries") == []:
            return {"Successful": [], "Failed": refused}
        answer = await self.model.call(service, operation, params, deadline_s=deadline_s)
        self.model.fault_source.service_rates = CALM
        if operation == "ReceiveMessage":
            self.after_receive()
        return {**answer, "Failed": [*answer["Failed"], *refused]} if refused else answer

    @asynccontextmanager
    async def open(
        self, service: str, operation: str, params: Params, *, deadline_s: float
    ) -> AsyncGenerator[Answer, None]:
        yield await self.call(service, operation, params, deadline_s=deadline_s)

    def _current_faults(self) -> FaultRates:
        empty, self.empty = self.empty, max(0, self.empty - 1)
        twice, self.twice = self.twice, max(0, self.twice - 1)
        faults = SqsFaults(false_empty_rate=float(empty > 0), duplicate_rate=float(twice > 0))
        return FaultRates(sqs=faults)

    def _shorten(self, params: Params) -> tuple[Params, list[Answer]]:
        entries = params["Entries"]
        taken = max(0, len(entries) - (self.short.pop(0) if self.short else 0))
        code, is_ours = self.why
        refused = [
            {"Id": entry["Id"], "SenderFault": is_ours, "Code": code} for entry in entries[taken:]
        ]
        return {**params, "Entries": entries[:taken]}, refused
