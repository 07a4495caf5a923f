"""Doorbell: tells some worker, over the control queue, that there is a batch to ingest
(docs/engines.md, Queues on SQS).

A ring is never the truth: one that is lost costs the time until the sweeper looks, and one that is
heard twice, or too late, is only a look in vain. So ringing never fails. What nobody could answer
ends up on the dead queue, for people.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from conveyor.domain.ids import JobId, RunId
from conveyor.domain.randomness import Random
from conveyor.engines.aws.batches import ENTRIES_MAX, all_entries
from conveyor.engines.aws.errors import AwsError
from conveyor.engines.aws.seam import Answer, Params, Seam
from conveyor.ports.errors import QueueGone, Unavailable

log = logging.getLogger(__name__)

VERSION = 1
LISTEN_S = 20
_BATCH_OPENED = "batch_opened"


class _Note(msgspec.Struct):
    v: int
    kind: str
    job_id: JobId
    run_id: RunId


class Ring(msgspec.Struct, frozen=True):
    """A batch of this run was opened. `receipt` is for `answered`."""

    receipt: str
    job_id: JobId
    run_id: RunId


_decode = msgspec.json.Decoder(_Note).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Doorbell:
    seam: Seam
    random: Random
    control_url: str

    async def batch_opened(self, job_id: JobId, run_id: RunId) -> None:
        body = _encode(_Note(VERSION, _BATCH_OPENED, job_id, run_id)).decode()
        try:
            await self._ask("SendMessage", {"MessageBody": body})
        except (AwsError, QueueGone, Unavailable) as error:
            log.warning("nobody was told of a batch", extra={"run": run_id, "cause": str(error)})

    async def listen(self, *, wait_s: int = LISTEN_S) -> list[Ring]:
        """Waits for rings, up to `wait_s`; they are heard again unless they are answered.

        Those of another release are left to it. Unavailable and QueueGone come through.
        """
        params = {"MaxNumberOfMessages": ENTRIES_MAX, "WaitTimeSeconds": wait_s}
        answer = await self._ask("ReceiveMessage", params)
        rings = [_ring(each) for each in answer.get("Messages", ())]
        return [ring for ring in rings if ring is not None]

    async def answered(self, rings: Sequence[Ring]) -> None:
        """They are not heard again."""
        entries = [{"ReceiptHandle": ring.receipt} for ring in rings]
        await all_entries(self._ask, "DeleteMessageBatch", entries, self.random)

    async def _ask(self, operation: str, params: Params) -> Answer:
        return await self.seam.call("sqs", operation, {"QueueUrl": self.control_url, **params})


def _ring(message: Params) -> Ring | None:
    try:
        note = _decode(message["Body"])
    except msgspec.DecodeError:
        return None
    if (note.v, note.kind) != (VERSION, _BATCH_OPENED):
        return None
    return Ring(message["ReceiptHandle"], note.job_id, note.run_id)
