"""The modelled SQS: it behaves like the real service also where emulators are more lenient
(docs/simulator.md, Models).

A visibility change with an expired receipt succeeds, and hides the message even if another consumer
has received it. A delete with an old receipt succeeds and does nothing. A receipt of another queue
is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import trio

from conveyor.engines.aws.errors import AwsError, NoResponse
from conveyor.simulation.models.fault_source import FaultSource

URL = "https://sqs.test/000000000000/"
ARN = "arn:aws:sqs:test:000000000000:"
# A queue with the name of a removed one cannot be created within this time.
REMOVED_S = 60.0
# The limits of SQS.
ENTRIES_MAX = 10
BATCH_BYTES_MAX = 256 * 1024
VISIBILITY_S_MAX = 12 * 3600
NAME_CHARS_MAX = 80
# Bodies of foreign messages: invalid JSON, JSON of another shape, and versions that do not exist.
GARBAGE = (
    "no JSON",
    "[]",
    "x" * 10_000,
    '{"v": 1}',
    '{"v": 1, "ref": {"run_id": 7}}',
    '{"v": 2, "ref": {}}',
    '{"v": "1", "ref": null}',
    "\ud7ff\ufffd",
)
# So many more messages are taken from a queue to be shuffled.
_SHUFFLED = 20

Params = Mapping[str, Any]
Answer = dict[str, Any]


@dataclass(slots=True)
class Message:
    """One message. `turn` counts how often its visibility changed."""

    number: int
    body: str
    sent_at: float
    visible_at: float
    receives: int = 0
    turn: int = 0


@dataclass(slots=True)
class Queue:
    """`_ready` orders messages by the time at which they become visible. An entry with an old
    `turn` is void."""

    number: int
    attributes: dict[str, str]
    seen_at: float
    messages: dict[int, Message] = field(default_factory=dict)
    changed: trio.Event = field(default_factory=trio.Event)
    _ready: list[tuple[float, int, int]] = field(default_factory=list)

    def show(self, message: Message, at: float) -> None:
        """Makes the message visible at this instant and not before."""
        message.visible_at, message.turn = at, message.turn + 1
        self.messages[message.number] = message
        heappush(self._ready, (at, message.number, message.turn))
        self.changed.set()
        self.changed = trio.Event()

    def next_visible_at(self) -> float | None:
        self._drop_void()
        return self._ready[0][0] if self._ready else None

    def visible(self, now: float) -> Message | None:
        """Removes the next visible message from the order and returns it."""
        self._drop_void()
        if not self._ready or self._ready[0][0] > now:
            return None
        return self.messages[heappop(self._ready)[1]]

    def _drop_void(self) -> None:
        while self._ready:
            _, number, turn = self._ready[0]
            message = self.messages.get(number)
            if message is not None and message.turn == turn:
                return
            heappop(self._ready)


@dataclass(slots=True)
class SqsModel:
    """All queues of one account. `_ghosts` are removed queues that still accept messages."""

    fault_source: FaultSource
    now: Callable[[], float]
    queues: dict[str, Queue] = field(default_factory=dict)
    _removed_at: dict[str, float] = field(default_factory=dict)
    _ghosts: dict[str, float] = field(default_factory=dict)
    _number: int = 0
    _handlers: dict[str, Callable[[Params], Answer]] = field(init=False)

    def __post_init__(self) -> None:
        self._handlers = {
            "CreateQueue": self._create,
            "GetQueueUrl": self._url,
            "DeleteQueue": self._remove,
            "GetQueueAttributes": self._attributes,
            "SetQueueAttributes": self._set_attributes,
            "SendMessage": self._send_one,
            "SendMessageBatch": self._send,
            "ReceiveMessage": self._receive,
            "DeleteMessageBatch": self._delete,
            "ChangeMessageVisibilityBatch": self._change,
        }

    def run(self, operation: str, params: Params) -> Answer:
        if operation not in self._handlers:
            raise NotImplementedError(f"sqs.{operation}")
        return self._handlers[operation](params)

    async def poll(self, params: Params) -> Answer:
        """A receive that waits until a message is visible or its wait time is over."""
        ends_at = trio.current_time() + params["WaitTimeSeconds"]
        while True:
            answer = self._receive(params)
            left_s = ends_at - trio.current_time()
            if answer or left_s <= 0:
                return answer
            queue = self.queues[params["QueueUrl"]]
            visible_at = queue.next_visible_at()
            if visible_at is not None:
                left_s = min(left_s, max(0.001, visible_at - self.now()))
            with trio.move_on_after(left_s):
                await queue.changed.wait()

    def _create(self, params: Params) -> Answer:
        name, now = params["QueueName"], self.now()
        if len(name) > NAME_CHARS_MAX or not name.replace("-", "").replace("_", "").isalnum():
            raise AwsError("InvalidParameterValue", "no name for a queue")
        url, attributes = URL + name, dict(params.get("Attributes", {}))
        if url in self._removed_at and now < self._removed_at[url] + REMOVED_S:
            raise AwsError("QueueDeletedRecently", "wait 60 seconds")
        existing = self.queues.get(url)
        if existing is not None:
            if existing.attributes != attributes:
                raise AwsError("QueueNameExists", "it has other attributes")
            return {"QueueUrl": url}
        faults = self.fault_source.service_rates.sqs
        is_unseen = self.fault_source.occurs("sqs.unseen", faults.unseen_rate)
        seen_at = now + self.fault_source.seconds(faults.unseen_s) if is_unseen else now
        self.queues[url] = Queue(self._next(), attributes, seen_at)
        self._ghosts.pop(url, None)
        return {"QueueUrl": url}

    def _url(self, params: Params) -> Answer:
        url = URL + params["QueueName"]
        self._queue({"QueueUrl": url})
        return {"QueueUrl": url}

    def _set_attributes(self, params: Params) -> Answer:
        self._queue(params).attributes.update(params["Attributes"])
        return {}

    def _remove(self, params: Params) -> Answer:
        self._queue(params)
        url, now, faults = params["QueueUrl"], self.now(), self.fault_source.service_rates.sqs
        queue = self.queues.pop(url)
        queue.changed.set()
        self._removed_at[url] = now
        if self.fault_source.occurs("sqs.ghost", faults.ghost_rate):
            self._ghosts[url] = now + self.fault_source.seconds(faults.ghost_s)
        return {}

    def _queue(self, params: Params) -> Queue:
        queue = self.queues.get(params["QueueUrl"])
        if queue is None or queue.seen_at > self.now():
            raise AwsError("QueueDoesNotExist", "The specified queue does not exist.")
        return queue

    def _attributes(self, params: Params) -> Answer:
        queue, now = self._queue(params), self.now()
        visible = sum(message.visible_at <= now for message in queue.messages.values())
        hidden = len(queue.messages) - visible
        said = {
            "QueueArn": ARN + params["QueueUrl"].removeprefix(URL),
            "ApproximateNumberOfMessages": str(visible),
            "ApproximateNumberOfMessagesNotVisible": str(hidden),
            "ApproximateNumberOfMessagesDelayed": "0",
            **queue.attributes,
        }
        names = params.get("AttributeNames", ())
        return {"Attributes": {name: said[name] for name in said if {name, "All"} & {*names}}}

    def _send_one(self, params: Params) -> Answer:
        self._put(params["QueueUrl"], params["MessageBody"])
        return {"MessageId": str(self._number)}

    def _send(self, params: Params) -> Answer:
        size = sum(len(entry["MessageBody"].encode()) for entry in params["Entries"])
        if size > BATCH_BYTES_MAX:
            raise AwsError("BatchRequestTooLong", "Batch requests cannot be longer than 256 KiB")
        url = params["QueueUrl"]
        if self._ghosts.get(url, 0.0) <= self.now():
            self._queue(params)
        return self._for_each_entry(params, lambda entry: self._put(url, entry["MessageBody"]))

    def _put(self, url: str, body: str) -> None:
        now = self.now()
        if self._ghosts.get(url, 0.0) > now:
            return  # The removed queue accepts the message and loses it.
        queue = self._queue({"QueueUrl": url})
        queue.show(Message(self._next(), body, now, now), now)
        if self.fault_source.occurs(
            "sqs.garbage", self.fault_source.service_rates.sqs.garbage_rate
        ):
            queue.show(Message(self._next(), self.fault_source.one_of(GARBAGE), now, now), now)

    def _receive(self, params: Params) -> Answer:
        queue, now, faults = self._queue(params), self.now(), self.fault_source.service_rates.sqs
        if self.fault_source.occurs("sqs.false_empty", faults.false_empty_rate):
            return {}
        self._refuse_over_limit(queue, now)
        most = params.get("MaxNumberOfMessages", 1)
        assert 1 <= most <= ENTRIES_MAX
        messages = self._shuffle(queue, self._take_messages(queue, now, most))
        deliveries = [self._deliver(queue, message, params) for message in messages[:most]]
        for message in messages[most:]:
            queue.show(message, message.visible_at)
        if deliveries and self.fault_source.occurs("sqs.lost_receive", faults.lost_receive_rate):
            raise NoResponse("the connection closed", was_sent=True)
        return {"Messages": deliveries} if deliveries else {}

    def _take_messages(self, queue: Queue, now: float, most: int) -> list[Message]:
        """The next visible messages. If messages are reordered, more than requested, to shuffle
        them."""
        if self.fault_source.service_rates.sqs.reordered_rate:
            most += _SHUFFLED
        messages: list[Message] = []
        while len(messages) < most and (message := queue.visible(now)) is not None:
            if self._is_kept(queue, message, now):
                messages.append(message)
        return messages

    def _shuffle(self, queue: Queue, messages: list[Message]) -> list[Message]:
        rate = self.fault_source.service_rates.sqs.reordered_rate
        if len(messages) > 1 and self.fault_source.occurs("sqs.reordered", rate):
            for at in range(len(messages) - 1, 0, -1):
                other = self.fault_source.below(at + 1)
                messages[at], messages[other] = messages[other], messages[at]
        return messages

    def _is_kept(self, queue: Queue, message: Message, now: float) -> bool:
        """Removes messages that are past their retention, and moves those that were received too
        often to the dead-letter queue; returns whether the message stays."""
        asked_s = float(queue.attributes.get("MessageRetentionPeriod", 4 * 24 * 3600))
        if now - message.sent_at >= min(
            asked_s, self.fault_source.service_rates.sqs.retention_s_max
        ):
            self.fault_source.count("sqs.retention")
            del queue.messages[message.number]
            return False
        redrive = json.loads(queue.attributes.get("RedrivePolicy", "{}"))
        if message.receives < redrive.get("maxReceiveCount", 1 << 30):
            return True
        del queue.messages[message.number]
        elsewhere = self.queues.get(URL + redrive["deadLetterTargetArn"].removeprefix(ARN))
        if elsewhere is not None:
            message.receives = 0
            elsewhere.show(message, now)
        return False

    def _deliver(self, queue: Queue, message: Message, params: Params) -> Answer:
        now, faults = self.now(), self.fault_source.service_rates.sqs
        default = queue.attributes.get("VisibilityTimeout", "30")
        hidden_s = float(params.get("VisibilityTimeout", default))
        assert 0 <= hidden_s <= VISIBILITY_S_MAX
        message.receives += 1
        if self.fault_source.occurs("sqs.duplicate", faults.duplicate_rate):
            hidden_s = 0.0
        queue.show(message, now + self._drift(hidden_s))
        receipt = f"{queue.number}-{message.number}-{message.receives}"
        counts = {"ApproximateReceiveCount": str(message.receives)}
        return {
            "MessageId": str(message.number),
            "Body": message.body,
            "ReceiptHandle": receipt,
            "Attributes": counts,
        }

    def _drift(self, hidden_s: float) -> float:
        drift = self.fault_source.service_rates.sqs.visibility_drift
        if not drift or not hidden_s:
            return hidden_s
        self.fault_source.count("sqs.visibility_drift")
        return hidden_s * self.fault_source.seconds((1 - drift, 1 + drift))

    def _refuse_over_limit(self, queue: Queue, now: float) -> None:
        most = self.fault_source.service_rates.sqs.in_flight_max
        if len(queue.messages) < most:
            return
        messages = queue.messages.values()
        if sum(message.visible_at > now and message.receives > 0 for message in messages) >= most:
            self.fault_source.count("sqs.over_limit")
            raise AwsError("OverLimit", "too many messages are in flight", status=403)

    def _delete(self, params: Params) -> Answer:
        queue = self._queue(params)
        return self._for_each_entry(
            params, lambda entry: self._forget(queue, entry["ReceiptHandle"])
        )

    def _forget(self, queue: Queue, receipt: str) -> None:
        message, is_newest = self._find_message(queue, receipt)
        if message is None:
            return
        faults, now = self.fault_source.service_rates.sqs, self.now()
        if not is_newest:
            self.fault_source.count("sqs.stale_receipt")
            return
        is_lapsed = message.visible_at <= now
        if is_lapsed and self.fault_source.occurs("sqs.stale_receipt", faults.stale_receipt_rate):
            return
        if self.fault_source.occurs("sqs.undead", faults.undead_rate):
            queue.show(message, now + self.fault_source.seconds(faults.undead_s))
        else:
            del queue.messages[message.number]

    def _change(self, params: Params) -> Answer:
        queue = self._queue(params)

        def change(entry: Params) -> None:
            message, _ = self._find_message(queue, entry["ReceiptHandle"])
            if message is None:
                raise AwsError("InvalidParameterValue", "Message does not exist")
            hidden_s = float(entry["VisibilityTimeout"])
            assert 0 <= hidden_s <= VISIBILITY_S_MAX
            queue.show(message, self.now() + self._drift(hidden_s))

        return self._for_each_entry(params, change)

    def _find_message(self, queue: Queue, receipt: str) -> tuple[Message | None, bool]:
        """The message of a receipt, if it still exists, and whether the receipt is its newest."""
        parts = receipt.split("-")
        if len(parts) != 3 or parts[0] != str(queue.number):
            raise AwsError("ReceiptHandleIsInvalid", "The input receipt handle is invalid.")
        message = queue.messages.get(int(parts[1]))
        return message, message is not None and message.receives == int(parts[2])

    def _for_each_entry(self, params: Params, do: Callable[[Params], None]) -> Answer:
        entries, rate = params["Entries"], self.fault_source.service_rates.sqs.partial_batch_rate
        if not entries:
            raise AwsError("EmptyBatchRequest", "There should be at least one entry")
        if len(entries) > ENTRIES_MAX:
            raise AwsError("TooManyEntriesInBatchRequest", "Maximum number of entries are 10")
        done: list[Answer] = []
        failed: list[Answer] = []
        for entry in entries:
            if self.fault_source.occurs("sqs.partial_batch", rate):
                failed.append({"Id": entry["Id"], "SenderFault": False, "Code": "InternalError"})
                continue
            try:
                do(entry)
            except AwsError as error:
                failed.append({"Id": entry["Id"], "SenderFault": True, "Code": error.code})
            else:
                done.append({"Id": entry["Id"]})
        return {"Successful": done, "Failed": failed}

    def _next(self) -> int:
        self._number += 1
        return self._number
