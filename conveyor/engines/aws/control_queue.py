"""The control queue: notifies one worker that there is a batch to ingest
(docs/engines.md, Queues on SQS).

A control message is never authoritative. If it is lost, the sweeper finds the batch later. If it
arrives twice or late, the worker reads the batch row and finds nothing to do. So sending never
fails. Messages that no worker could process are moved to the dead-letter queue for the operator.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import msgspec
import trio

from conveyor.domain.ids import JobId, Random, RunId
from conveyor.engines.aws.client.client import Answer, AwsClient, Params
from conveyor.engines.aws.errors import AwsError
from conveyor.engines.aws.sqs import ENTRIES_MAX, all_entries
from conveyor.ports.errors import QueueGone, Unavailable

log = logging.getLogger(__name__)

VERSION = 1
LISTEN_S = 20  # The longest long poll of SQS: fewer, longer calls cost less.
_BATCH_OPENED = "batch_opened"


class _ControlBody(msgspec.Struct):
    v: int
    kind: str
    job_id: JobId
    run_id: RunId


class ControlMessage(msgspec.Struct, frozen=True):
    """A batch of this run was opened. `receipt` is for `delete`."""

    receipt: str
    job_id: JobId
    run_id: RunId


_decode = msgspec.json.Decoder(_ControlBody).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlQueue:
    client: AwsClient
    random: Random
    control_url: str

    async def batch_opened(self, job_id: JobId, run_id: RunId) -> None:
        body = _encode(_ControlBody(VERSION, _BATCH_OPENED, job_id, run_id)).decode()
        try:
            await self._ask("SendMessage", {"MessageBody": body})
        except (AwsError, QueueGone, Unavailable) as error:
            log.warning("ingest notification not sent", extra={"run": run_id, "cause": str(error)})

    async def receive(self, *, wait_s: int = LISTEN_S) -> list[ControlMessage]:
        """Waits up to `wait_s` for messages. They are delivered again unless `delete` is called.

        Messages of another release are left for its workers. Raises Unavailable and QueueGone.
        """
        params = {"MaxNumberOfMessages": ENTRIES_MAX, "WaitTimeSeconds": wait_s}
        answer = await self._ask("ReceiveMessage", params)
        rings = [_ring(message) for message in answer.get("Messages", ())]
        return [ring for ring in rings if ring is not None]

    async def delete(self, rings: Sequence[ControlMessage]) -> None:
        """Deletes messages, so that they are not delivered again."""
        entries = [{"ReceiptHandle": ring.receipt} for ring in rings]
        await all_entries(self._ask, "DeleteMessageBatch", entries, self.random)

    async def _ask(self, operation: str, params: Params) -> Answer:
        return await self.client.call("sqs", operation, {"QueueUrl": self.control_url, **params})


def _ring(message: Params) -> ControlMessage | None:
    try:
        note = _decode(message["Body"])
    except msgspec.DecodeError:
        return None
    if (note.v, note.kind) != (VERSION, _BATCH_OPENED):
        return None
    return ControlMessage(message["ReceiptHandle"], note.job_id, note.run_id)


# The listener: a worker that receives a control message ingests the batch
# (docs/engines.md, Queues on SQS).


# The pause after a failed receive, so that an outage does not become a loop of calls.
LISTEN_AGAIN_S = 1.0


async def listen_forever(
    control_queue: ControlQueue, hear: Callable[[JobId, RunId], Awaitable[None]]
) -> NoReturn:
    """Passes control messages to `hear`, forever.

    If the process ends before the batch is ingested, the sweeper finds the open batch.
    """
    while True:
        try:
            rings = await control_queue.receive()
            for ring in rings:
                await hear(ring.job_id, ring.run_id)
            # Deleted after they were handled: a crash in between delivers them again.
            await control_queue.delete(rings)
        except (QueueGone, Unavailable) as error:
            log.warning("control queue unavailable", extra={"cause": str(error)})
            await trio.sleep(LISTEN_AGAIN_S)
