"""SQS as it may behave where emulators are kind: a plane in virtual time, with its whims on call.

A visibility change with a lapsed receipt is granted, and hides the message whoever has it. A delete
with an old receipt is granted and does nothing. A receipt of another queue is refused.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from conveyor.engines.aws.errors import AwsError
from conveyor.ports.clock import Clock

REMOVED_S = 60.0
URL = "http://sqs.test/000000000000/"

Params = Mapping[str, Any]


@dataclass(slots=True)
class Kept:
    body: str
    visible_at: float
    handles: list[str] = field(default_factory=list)


@dataclass(slots=True)
class SimulatedSqs:
    """`unseen`, `empty` and `twice` count the calls yet to be spoilt: queues that are not seen
    after their making, receives that find nothing, receives that hide nothing. `short` says how
    many entries of each batch to come are not taken."""

    clock: Clock
    unseen: int = 0
    empty: int = 0
    twice: int = 0
    short: list[int] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    queues: dict[str, list[Kept]] = field(default_factory=dict)
    _removed_at: dict[str, float] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def call(
        self, service: str, operation: str, params: Params, *, deadline_s: float
    ) -> dict[str, Any]:
        assert service == "sqs"
        await trio.lowlevel.checkpoint()
        self.calls[operation] += 1
        doers: dict[str, Callable[[Params], dict[str, Any]]] = {
            "CreateQueue": self._create,
            "GetQueueUrl": self._url,
            "DeleteQueue": self._delete_queue,
            "GetQueueAttributes": self._attributes,
            "SendMessageBatch": self._send,
            "ReceiveMessage": self._receive,
            "DeleteMessageBatch": self._delete,
            "ChangeMessageVisibilityBatch": self._change,
        }
        return doers[operation](params)

    @asynccontextmanager
    async def open(
        self, service: str, operation: str, params: Params, *, deadline_s: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        yield await self.call(service, operation, params, deadline_s=deadline_s)

    def _create(self, params: Params) -> dict[str, Any]:
        url = URL + params["QueueName"]
        if self.clock.now() < self._removed_at.get(url, 0.0) + REMOVED_S:
            raise AwsError("QueueDeletedRecently", "wait a minute")
        self.queues.setdefault(url, [])
        return {"QueueUrl": url}

    def _url(self, params: Params) -> dict[str, Any]:
        url = URL + params["QueueName"]
        self._queue({"QueueUrl": url})
        return {"QueueUrl": url}

    def _queue(self, params: Params) -> list[Kept]:
        url = params["QueueUrl"]
        if url in self.queues and self.unseen:
            self.unseen -= 1
        elif url in self.queues:
            return self.queues[url]
        raise AwsError("QueueDoesNotExist", "no such queue")

    def _delete_queue(self, params: Params) -> dict[str, Any]:
        self._queue(params)
        del self.queues[params["QueueUrl"]]
        self._removed_at[params["QueueUrl"]] = self.clock.now()
        return {}

    def _attributes(self, params: Params) -> dict[str, Any]:
        queue, now = self._queue(params), self.clock.now()
        visible = sum(each.visible_at <= now for each in queue)
        counts = {
            "ApproximateNumberOfMessages": str(visible),
            "ApproximateNumberOfMessagesNotVisible": str(len(queue) - visible),
            "ApproximateNumberOfMessagesDelayed": "0",
        }
        return {"Attributes": counts}

    def _send(self, params: Params) -> dict[str, Any]:
        queue = self._queue(params)

        def send(entry: Params) -> None:
            queue.append(Kept(entry["MessageBody"], self.clock.now()))

        return self._each(params, send)

    def _receive(self, params: Params) -> dict[str, Any]:
        queue, now = self._queue(params), self.clock.now()
        if self.empty:
            self.empty -= 1
            return {}
        visible = [each for each in queue if each.visible_at <= now]
        visible.sort(key=lambda each: each.visible_at)
        is_spoilt, self.twice = self.twice > 0, max(0, self.twice - 1)
        found = []
        for each in visible[: params["MaxNumberOfMessages"]]:
            each.handles.append(f"handle-{next(self._numbers)}")
            each.visible_at = now if is_spoilt else now + params["VisibilityTimeout"]
            receives = {"ApproximateReceiveCount": str(len(each.handles))}
            found.append(
                {"Body": each.body, "ReceiptHandle": each.handles[-1], "Attributes": receives}
            )
        return {"Messages": found} if found else {}

    def _delete(self, params: Params) -> dict[str, Any]:
        queue = self._queue(params)

        def delete(entry: Params) -> None:
            handle = entry["ReceiptHandle"]
            queue[:] = [each for each in queue if each.handles[-1:] != [handle]]

        return self._each(params, delete)

    def _change(self, params: Params) -> dict[str, Any]:
        queue = self._queue(params)

        def change(entry: Params) -> None:
            meant = [each for each in queue if entry["ReceiptHandle"] in each.handles]
            if not meant:
                raise AwsError("ReceiptHandleIsInvalid", "no receipt of this queue")
            meant[0].visible_at = self.clock.now() + entry["VisibilityTimeout"]

        return self._each(params, change)

    def _each(self, params: Params, do: Callable[[Params], None]) -> dict[str, Any]:
        entries = params["Entries"]
        assert 1 <= len(entries) <= 10
        taken = max(0, len(entries) - (self.short.pop(0) if self.short else 0))
        done, failed = [], []
        for number, entry in enumerate(entries):
            try:
                if number >= taken:
                    raise AwsError("InternalError", "not now", status=500)
                do(entry)
            except AwsError as error:
                is_ours = error.status < 500
                failed.append({"Id": entry["Id"], "SenderFault": is_ours, "Code": error.code})
            else:
                done.append({"Id": entry["Id"]})
        return {"Successful": done, "Failed": failed}
