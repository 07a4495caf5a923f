"""Doorbell: tells some worker, over the control queue, that there is a batch to ingest
(docs/engines.md, Queues on SQS).

A ring is never the truth: one that is lost costs the time until the sweeper looks, and one that is
heard twice, or too late, is only a look in vain. So ringing never fails. What nobody could answer
ends up on the dead queue, for people.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import msgspec
import trio

from conveyor.domain.ids import JobId, RunId
from conveyor.domain.randomness import Random
from conveyor.engines.aws.client.client import Answer, AwsClient, Params
from conveyor.engines.aws.errors import AwsError
from conveyor.engines.aws.sqs.batch import ENTRIES_MAX, all_entries
from conveyor.ports.errors import QueueGone, Unavailable

log = logging.getLogger(__name__)

VERSION = 1
LISTEN_S = 20
_BATCH_OPENED = "batch_opened"


class _ControlBody(msgspec.Struct):
    v: int
    kind: str
    job_id: JobId
    run_id: RunId


class ControlMessage(msgspec.Struct, frozen=True):
    """A batch of this run was opened. `receipt` is for `answered`."""

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
        """Waits for rings, up to `wait_s`; they are heard again unless they are answered.

        Those of another release are left to it. Unavailable and QueueGone come through.
        """
        params = {"MaxNumberOfMessages": ENTRIES_MAX, "WaitTimeSeconds": wait_s}
        answer = await self._ask("ReceiveMessage", params)
        rings = [_ring(each) for each in answer.get("Messages", ())]
        return [ring for ring in rings if ring is not None]

    async def delete(self, rings: Sequence[ControlMessage]) -> None:
        """They are not heard again."""
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


# The porter answers the doorbell: a batch that was opened anywhere is walked here
# (docs/engines.md, Queues on SQS).


LISTEN_AGAIN_S = 1.0


async def listen_forever(
    control_queue: ControlQueue, hear: Callable[[JobId, RunId], Awaitable[None]]
) -> NoReturn:
    """Whoever dies with a ring in hand leaves an open batch, which the sweeper finds."""
    while True:
        try:
            rings = await control_queue.receive()
            for ring in rings:
                await hear(ring.job_id, ring.run_id)
            await control_queue.delete(rings)
        except (QueueGone, Unavailable) as error:
            log.warning("control queue unavailable", extra={"cause": str(error)})
            await trio.sleep(LISTEN_AGAIN_S)
