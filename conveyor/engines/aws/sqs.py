"""SqsQueue: one SQS queue per run, and the format of its messages (docs/engines.md, Queues on SQS).

A message is a schema version and a task reference. It contains no secret and no customer data.
"""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from math import ceil
from typing import Any, TypeVar

import msgspec
import trio

from conveyor.domain.ids import Random, RunId
from conveyor.domain.model import TaskRef
from conveyor.engines.aws.client.client import ATTEMPTS_MAX, Answer, AwsClient, Params, backoff_s
from conveyor.engines.aws.errors import THROTTLES, AwsError
from conveyor.engines.aws.gather import gather_results, unwrap_all
from conveyor.ports.clock import Clock
from conveyor.ports.errors import QueueGone, Unavailable
from conveyor.ports.queue import Depth, Message

VERSION = 1


class Undecodable(Enum):
    """Why a message contains no task reference that this release can read."""

    OTHER_RELEASE = "another release may understand it"
    GARBAGE = "no release can understand it"


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
        assert PREFIX.match(self.prefix)

    async def open_run(self, run_id: RunId) -> None:
        url = await make(self.client, self.prefix + run_id, RUN_ATTRIBUTES)
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
        jobs = [partial(self._send, *refs_of_run) for refs_of_run in by_run.items()]
        unwrap_all(await gather_results(jobs, parallel_max=CONCURRENT_CALLS_MAX))

    async def receive(self, run_id: RunId, *, count_max: int, visibility_s: float) -> list[Message]:
        # SQS returns at most ten messages per call and bills every call. A queue that was empty
        # last time is asked with one call only.
        ask_count = min(count_max, ENTRIES_MAX) if run_id in self._dry else count_max
        starts = range(0, ask_count, ENTRIES_MAX)
        jobs = [
            partial(self._receive, run_id, min(ENTRIES_MAX, ask_count - start), visibility_s)
            for start in starts
        ]
        results = await gather_results(jobs, parallel_max=CONCURRENT_CALLS_MAX)
        # Messages of successful calls are kept even if other calls failed: they are hidden now, and
        # no other worker would receive them before their time is over.
        messages = [message for result in results if isinstance(result, list) for message in result]
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
        extended = [message for message in held if message.receipt not in refused]
        self._hold(extended, now + visibility_s)
        return frozenset(message.receipt for message in messages) - {
            message.receipt for message in extended
        }

    async def ack(self, messages: Sequence[Message]) -> None:
        """Deletes messages. A receipt that SQS refuses belongs to a message that was deleted or
        received again, so it is ignored."""
        by_run = _by_run(messages)
        jobs = [partial(self._delete, *receipts_of_run) for receipts_of_run in by_run.items()]
        unwrap_all(await gather_results(jobs, parallel_max=CONCURRENT_CALLS_MAX))
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
            visible=int(counts[_VISIBLE]),
            hidden=sum(int(counts.get(attribute, 0)) for attribute in _HIDDEN),
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
        for message in answer.get("Messages", ()):
            receives = int(message["Attributes"][_RECEIVES])
            match opened(message["Body"]):
                case Undecodable.OTHER_RELEASE if receives < FOREIGN_RECEIVES_MAX:
                    log.warning("message of another schema version skipped", extra={"run": run_id})
                case Undecodable():
                    await self._move_to_dead_letter(run_id, message)
                case ref:
                    messages.append(Message(message["ReceiptHandle"], ref, receives))
        self._hold(messages, until)
        return messages

    async def _move_to_dead_letter(self, run_id: RunId, message: Mapping[str, Any]) -> None:
        """Copies a message to the dead-letter queue, then deletes it, in this order.

        If it stayed, the sweeper would never see an empty queue. If a step fails, the next receive
        of the message repeats both.
        """
        try:
            dead_url = await url_of(self.client, self.prefix + DEAD)
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
        return set().union(
            *unwrap_all(await gather_results(jobs, parallel_max=CONCURRENT_CALLS_MAX))
        )

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
            url = await url_of(self.client, self.prefix + run_id)
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


# Batch calls of SQS: ten entries each, repeated until SQS has answered every entry.
#
# A successful batch may have failed in part. An entry counts as done only if the answer lists it as
# successful. That it is missing among the failures proves nothing.


ENTRIES_MAX = 10  # The limit of SQS.
# Concurrent calls of one batch operation. More would use more connections, fewer take longer.
CONCURRENT_CALLS_MAX = 8
ROUNDS_S_MAX = 20.0
"""No new round begins after so long: received messages become visible again after 60 s."""

_DEAD_RECEIPTS = frozenset(
    {"InvalidParameterValue", "MessageNotInflight", "ReceiptHandleIsInvalid"}
)

T = TypeVar("T")
Entry = Mapping[str, Any]
Ask = Callable[[str, Params], Awaitable[Answer]]


async def all_entries(
    ask: Ask, operation: str, entries: Sequence[Entry], random: Random
) -> dict[int, str]:
    """Sends all entries. Returns the codes of the entries that SQS refused for good, by position.

    Raises Unavailable if some entries have no answer after several rounds; their outcome is
    unknown.
    """
    starts = range(0, len(entries), ENTRIES_MAX)
    jobs = [
        partial(_one_batch, ask, operation, start, entries[start : start + ENTRIES_MAX], random)
        for start in starts
    ]
    return {
        at: code
        for refused in unwrap_all(await gather_results(jobs, parallel_max=CONCURRENT_CALLS_MAX))
        for at, code in refused.items()
    }


async def _one_batch(
    ask: Ask, operation: str, start: int, entries: Sequence[Entry], random: Random
) -> dict[int, str]:
    # Entries without an answer. Their ids are positions in the whole list.
    waiting = dict(enumerate(entries, start))
    refused: dict[int, str] = {}
    ends_at = trio.current_time() + ROUNDS_S_MAX
    for attempt in range(1, ATTEMPTS_MAX + 1):
        batch = [{"Id": str(at), **entry} for at, entry in waiting.items()]
        answer = await ask(operation, {"Entries": batch})
        for done in answer.get("Successful", ()):
            waiting.pop(int(done["Id"]), None)
        for failed in answer.get("Failed", ()):
            if _is_final(failed):
                refused[int(failed["Id"])] = failed["Code"]
                waiting.pop(int(failed["Id"]), None)
        if not waiting:
            return refused
        if trio.current_time() >= ends_at:
            break
        await trio.sleep(backoff_s(attempt, random))
    raise Unavailable(f"sqs.{operation}: {len(waiting)} entries of a batch were not taken")


def _is_final(failed: Entry) -> bool:
    """Returns whether a retry cannot help. A throttle passes, even if SQS calls it the sender's
    fault; an expired receipt stays invalid, even if SQS does not."""
    code = failed["Code"]
    return code not in THROTTLES and (
        failed.get("SenderFault", False) or code.removesuffix("Exception") in _DEAD_RECEIPTS
    )


# Names and attributes of queues, and their creation, which may be repeated.
#
# A run's queue has no redrive policy: the row of the task decides about a reference that is
# delivered again and again.


# SQS allows 80 characters in a name, and a run's id has 26.
PREFIX = re.compile(r"[A-Za-z0-9_-]{1,50}\Z")
CONTROL, DEAD = "control", "control-dead"
# After so many receives SQS moves a control message to the dead-letter queue.
RECEIVES_MAX = 5
# A new queue may seem missing for some seconds.
NEW_LOOKS_MAX = 10
NEW_LOOK_S = 1.0

_RETENTION_S = 14 * 24 * 3600  # The limit of SQS: a waiting message should not disappear.
_VISIBILITY_S = 60
RUN_ATTRIBUTES = {
    "MessageRetentionPeriod": str(_RETENTION_S),
    "VisibilityTimeout": str(_VISIBILITY_S),
}


class ControlQueues(msgspec.Struct, frozen=True):
    """The URLs of the control queue and of its dead-letter queue."""

    control_url: str
    dead_url: str


async def make(client: AwsClient, name: str, attributes: Mapping[str, str]) -> str:
    """Creates the queue if it is missing, and returns its URL.

    Raises Unavailable for a queue that was just removed: SQS refuses to create it for a minute.
    """
    params = {"QueueName": name, "Attributes": attributes}
    try:
        answer = await client.call("sqs", "CreateQueue", params)
    except QueueGone as error:
        raise Unavailable("sqs.CreateQueue: the queue was removed a moment ago") from error
    except AwsError as error:
        # The queue exists with other attributes: another release created it.
        if error.code not in {"QueueNameExists", "QueueAlreadyExists"}:
            raise
        return await url_of(client, name)
    url: str = answer["QueueUrl"]
    return url


async def url_of(client: AwsClient, name: str) -> str:
    """Returns the URL of a queue. Raises QueueGone if there is none of this name."""
    answer = await client.call("sqs", "GetQueueUrl", {"QueueName": name})
    url: str = answer["QueueUrl"]
    return url


async def make_control_queues(client: AwsClient, prefix: str) -> ControlQueues:
    dead_url = await make(client, prefix + DEAD, RUN_ATTRIBUTES)
    params = {"QueueUrl": dead_url, "AttributeNames": ["QueueArn"]}
    arn = (await _patiently(client, "GetQueueAttributes", params))["Attributes"]["QueueArn"]
    redrive = {"deadLetterTargetArn": arn, "maxReceiveCount": RECEIVES_MAX}
    attributes = {**RUN_ATTRIBUTES, "RedrivePolicy": json.dumps(redrive)}
    control_url = await make(client, prefix + CONTROL, attributes)
    # An existing queue may have other attributes, if another release or a person created it.
    request = {"QueueUrl": control_url, "Attributes": attributes}
    await _patiently(client, "SetQueueAttributes", request)
    return ControlQueues(control_url, dead_url)


async def _patiently(client: AwsClient, operation: str, params: Params) -> Answer:
    """Repeats a call while the queue seems missing, because it may be new."""
    for _ in range(NEW_LOOKS_MAX):
        with suppress(QueueGone):
            return await client.call("sqs", operation, params)
        await trio.sleep(NEW_LOOK_S)
    return await client.call("sqs", operation, params)


async def find_control_queues(client: AwsClient, prefix: str) -> ControlQueues:
    """Finds both queues. Raises QueueGone if they were not created yet."""
    control_url = await url_of(client, prefix + CONTROL)
    return ControlQueues(control_url, await url_of(client, prefix + DEAD))
