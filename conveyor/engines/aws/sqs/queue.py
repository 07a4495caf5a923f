"""SqsQueue: one SQS queue per run, and the format of its messages (docs/engines.md, Queues on SQS).

A message is a schema version and a task reference. It contains no secret and no customer data.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from math import ceil
from typing import Any

import msgspec
import trio

from conveyor.domain.ids import Random, RunId
from conveyor.domain.model import TaskRef
from conveyor.engines.aws.client.client import Answer, AwsClient, Params
from conveyor.engines.aws.errors import AwsError
from conveyor.engines.aws.sqs import admin
from conveyor.engines.aws.sqs.batch import ENTRIES_MAX, all_entries, gather_results, unwrap_all
from conveyor.ports.clock import Clock
from conveyor.ports.errors import QueueGone, Unavailable
from conveyor.ports.queue import Depth, Message

VERSION = 1


class Undecodable(Enum):
    """Why a message contains no task reference that this release can read."""

    OTHER_RELEASE = "others may understand it"
    GARBAGE = "nobody will ever understand it"


class _Envelope(msgspec.Struct):
    v: int
    ref: msgspec.Raw


_decode = msgspec.json.Decoder(_Envelope).decode
_decode_ref = msgspec.json.Decoder(TaskRef).decode
_encode = msgspec.json.Encoder().encode


def sealed(ref: TaskRef) -> str:
    return _encode({"v": VERSION, "ref": ref}).decode()


def opened(body: str) -> TaskRef | Undecodable:
    try:
        envelope = _decode(body)
        return _decode_ref(envelope.ref) if envelope.v == VERSION else Undecodable.OTHER_RELEASE
    except msgspec.DecodeError:
        return Undecodable.GARBAGE


# SqsQueue: the queue of a run is created and removed with the run (docs/engines.md, Queues on SQS).
#
# Receipt expiry is tracked locally, because SQS does not report it: SQS grants an extension with an
# expired receipt, and so hides a message that another worker may have received. This class does not
# use a receipt after its end. A queue that was created a moment ago may seem missing, so for
# `NEW_S` calls to it are repeated.


log = logging.getLogger(__name__)

# How long a missing queue may still be a new one. A longer time delays QueueGone of removed queues.
NEW_S = 2.0
NEW_PAUSE_S = 0.2
VISIBILITY_S_MAX = 12 * 3600  # The limit of SQS.
# Both bound the memory. A forgotten URL costs one call of GetQueueUrl.
URLS_MAX = 10_000
HELD_MAX = 10_000
FOREIGN_RECEIVES_MAX = 20
"""About 20 minutes of receives. A worker of the other release would have received it by then."""

_VISIBLE = "ApproximateNumberOfMessages"
_HIDDEN = ("ApproximateNumberOfMessagesNotVisible", "ApproximateNumberOfMessagesDelayed")
_RECEIVES = "ApproximateReceiveCount"


@dataclass(slots=True, kw_only=True)
class SqsQueue:
    """`prefix` is the common beginning of the queue names."""

    client: AwsClient
    clock: Clock
    random: Random
    prefix: str
    _urls: dict[RunId, str] = field(default_factory=dict)
    _new_until: dict[RunId, float] = field(default_factory=dict)
    _held: dict[str, float] = field(default_factory=dict)
    _dry: set[RunId] = field(default_factory=set)

    def __post_init__(self) -> None:
        assert admin.PREFIX.match(self.prefix)

    async def open_run(self, run_id: RunId) -> None:
        url = await admin.make(self.client, self.prefix + run_id, admin.RUN_ATTRIBUTES)
        self._remember(run_id, url)
        self._new_until[run_id] = trio.current_time() + NEW_S

    async def close_run(self, run_id: RunId) -> None:
        with suppress(QueueGone):
            await self._ask(run_id, "DeleteQueue", {})
        self._forget(run_id)

    async def send(self, refs: Sequence[TaskRef]) -> None:
        by_run: defaultdict[RunId, list[TaskRef]] = defaultdict(list)
        for ref in refs:
            by_run[ref.run_id].append(ref)
        unwrap_all(await gather_results([partial(self._send, *each) for each in by_run.items()]))

    async def receive(self, run_id: RunId, *, count_max: int, visibility_s: float) -> list[Message]:
        # SQS returns at most ten messages per call and bills every call. A queue that was empty
        # last time is asked with one call only.
        wanted = min(count_max, ENTRIES_MAX) if run_id in self._dry else count_max
        starts = range(0, wanted, ENTRIES_MAX)
        jobs = [
            partial(self._receive, run_id, min(ENTRIES_MAX, wanted - start), visibility_s)
            for start in starts
        ]
        results = await gather_results(jobs)
        # Messages of successful calls are kept even if other calls failed: they are hidden now, and
        # no other worker would receive them before their time is over.
        messages = [each for result in results if isinstance(result, list) for each in result]
        if messages:
            self._dry.discard(run_id)
        elif unwrap_all(results):
            self._dry.add(run_id)
        return messages

    async def extend(self, messages: Sequence[Message], *, visibility_s: float) -> frozenset[str]:
        # The time is taken before the call: counted from after it, a receipt would seem valid for
        # longer than SQS hides the message.
        now = self.clock.steady()
        held = self._still_held(messages)
        refused = await self._set_visibility(held, visibility_s)
        kept = [message for message in held if message.receipt not in refused]
        self._hold(kept, now + visibility_s)
        return frozenset(each.receipt for each in messages) - {each.receipt for each in kept}

    async def ack(self, messages: Sequence[Message]) -> None:
        """Deletes messages. A receipt that SQS refuses belongs to a message that was deleted or
        received again, so it is ignored."""
        by_run = _by_run(messages)
        unwrap_all(await gather_results([partial(self._delete, *each) for each in by_run.items()]))
        self._forget_receipts(messages)

    async def bounce(self, messages: Sequence[Message], *, delay_s: float) -> None:
        await self._set_visibility(self._still_held(messages), delay_s)
        self._forget_receipts(messages)

    async def depth(self, run_id: RunId) -> Depth:
        params = {"AttributeNames": [_VISIBLE, *_HIDDEN]}
        try:
            answer = await self._ask(run_id, "GetQueueAttributes", params)
        except QueueGone:
            return Depth(visible=0, hidden=0)
        counts = answer["Attributes"]
        return Depth(
            visible=int(counts[_VISIBLE]), hidden=sum(int(counts.get(each, 0)) for each in _HIDDEN)
        )

    async def _send(self, run_id: RunId, refs: Sequence[TaskRef]) -> None:
        entries = [{"MessageBody": sealed(ref)} for ref in refs]
        for code in (await self._batch(run_id, "SendMessageBatch", entries)).values():
            raise AwsError(code, "sqs.SendMessageBatch refused a ref")

    async def _receive(self, run_id: RunId, count: int, visibility_s: float) -> list[Message]:
        # Taken before the call, as in `extend`.
        until = self.clock.steady() + visibility_s
        params = {
            "MaxNumberOfMessages": count,
            "VisibilityTimeout": _whole(visibility_s),
            "WaitTimeSeconds": 0,
            "MessageSystemAttributeNames": [_RECEIVES],
        }
        answer = await self._ask(run_id, "ReceiveMessage", params)
        messages: list[Message] = []
        for each in answer.get("Messages", ()):
            receives = int(each["Attributes"][_RECEIVES])
            match opened(each["Body"]):
                case Undecodable.OTHER_RELEASE if receives < FOREIGN_RECEIVES_MAX:
                    log.warning("message of another schema version skipped", extra={"run": run_id})
                case Undecodable():
                    await self._move_to_dead_letter(run_id, each)
                case ref:
                    messages.append(Message(each["ReceiptHandle"], ref, receives))
        self._hold(messages, until)
        return messages

    async def _move_to_dead_letter(self, run_id: RunId, message: Mapping[str, Any]) -> None:
        """Copies a message to the dead-letter queue, then deletes it, in this order.

        If it stayed, the sweeper would never see an empty queue. If a step fails, the next receive
        of the message repeats both.
        """
        try:
            dead_url = await admin.url_of(self.client, self.prefix + admin.DEAD)
            copy = {"QueueUrl": dead_url, "MessageBody": message["Body"]}
            await self.client.call("sqs", "SendMessage", copy)
            here = {"ReceiptHandle": message["ReceiptHandle"]}
            await self._batch(run_id, "DeleteMessageBatch", [here])
            log.warning("undecodable message moved to the dead-letter queue", extra={"run": run_id})
        except (AwsError, QueueGone, Unavailable) as error:
            log.warning("undecodable message", extra={"run": run_id, "cause": str(error)})

    async def _set_visibility(self, messages: Sequence[Message], delay_s: float) -> set[str]:
        """Sets when messages become visible. Returns the receipts that SQS refused."""
        by_run = _by_run(messages)
        jobs = [partial(self._change, run_id, group, delay_s) for run_id, group in by_run.items()]
        return set().union(*unwrap_all(await gather_results(jobs)))

    async def _change(self, run_id: RunId, group: Sequence[Message], delay_s: float) -> set[str]:
        after = {"VisibilityTimeout": _whole(delay_s)}
        entries = [{"ReceiptHandle": message.receipt, **after} for message in group]
        try:
            refused = await self._batch(run_id, "ChangeMessageVisibilityBatch", entries)
        except QueueGone:
            return {message.receipt for message in group}
        return {group[at].receipt for at in refused}

    async def _delete(self, run_id: RunId, group: Sequence[Message]) -> None:
        with suppress(QueueGone):
            entries = [{"ReceiptHandle": message.receipt} for message in group]
            await self._batch(run_id, "DeleteMessageBatch", entries)

    async def _batch(
        self, run_id: RunId, operation: str, entries: Sequence[Mapping[str, Any]]
    ) -> dict[int, str]:
        await self._url(run_id)  # One lookup here, instead of one per concurrent batch.
        return await all_entries(partial(self._ask, run_id), operation, entries, self.random)

    async def _ask(self, run_id: RunId, operation: str, params: Params) -> Answer:
        """Calls the run's queue, and repeats the call while the queue may be too new to find."""
        while True:
            try:
                url = await self._url(run_id)
                return await self.client.call("sqs", operation, {"QueueUrl": url, **params})
            except QueueGone:
                if trio.current_time() >= self._new_until.get(run_id, 0.0):
                    self._forget(run_id)
                    raise
            await trio.sleep(NEW_PAUSE_S)

    async def _url(self, run_id: RunId) -> str:
        url = self._urls.get(run_id)
        if url is None:
            url = await admin.url_of(self.client, self.prefix + run_id)
            self._remember(run_id, url)
        return url

    def _remember(self, run_id: RunId, url: str) -> None:
        if len(self._urls) >= URLS_MAX:
            self._forget(next(iter(self._urls)))
        self._urls[run_id] = url

    def _forget(self, run_id: RunId) -> None:
        self._urls.pop(run_id, None)
        self._new_until.pop(run_id, None)
        self._dry.discard(run_id)

    def _still_held(self, messages: Sequence[Message]) -> list[Message]:
        now = self.clock.steady()
        return [message for message in messages if self._held.get(message.receipt, 0.0) > now]

    def _hold(self, messages: Sequence[Message], until: float) -> None:
        # Receipts that were neither acked nor bounced stay here. They are removed in bulk, because
        # a search at every call would cost more.
        if len(self._held) >= HELD_MAX:
            now = self.clock.steady()
            self._held = {receipt: end for receipt, end in self._held.items() if end > now}
        self._held.update({message.receipt: until for message in messages})

    def _forget_receipts(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._held.pop(message.receipt, None)


def _by_run(messages: Sequence[Message]) -> dict[RunId, list[Message]]:
    groups: defaultdict[RunId, list[Message]] = defaultdict(list)
    for message in messages:
        groups[message.ref.run_id].append(message)
    return groups


def _whole(seconds: float) -> int:
    """Rounds up to whole seconds, at most twelve hours, as SQS requires."""
    return min(ceil(seconds), VISIBILITY_S_MAX)
