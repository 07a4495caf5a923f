"""The reference design as data: what each step of one task costs, according to its description.

Where the description is silent, the cheapest case is assumed: every row fits into one write unit,
no write is refused or repeated, everything that can be batched is batched, and the event rows
beside the tasks are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import msgspec

from conveyor.engines.aws.client import usage
from conveyor.engines.aws.client.usage import READ_UNIT_BYTES

BEAT_S = 10.0
LEASE_BYTES = 110
"""The bytes of a lease row: a partition key, a sort key and an expiry."""

RECEIVES = {"best": 1.59, "mean": 2.74, "worst": 4.65, "ungated": 9.7}
"""Receives of each message: the best, mean and worst of three runs of its authors with their gate,
and the lower of two figures that they measured without it."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of one step for one task. `why` is the part of the description it follows from."""

    name: str
    why: str
    calls: float
    write_units: float = 0.0
    read_units: float = 0.0
    is_sqs: bool = False
    is_s3: bool = False

    @property
    def usd_per_million(self) -> float:
        units = self.write_units * usage.WRITE_UNIT + self.read_units * usage.READ_UNIT
        requests = usage.SQS_REQUEST if self.is_sqs else usage.S3_WRITE_REQUEST * self.is_s3
        return units + self.calls * requests


def reference_steps(*, inflight: int, page_s: float, receives: float) -> Sequence[Step]:
    """Returns the steps of a task. Its job is at its cap `inflight`, and a page takes `page_s`."""
    counted = ceil(inflight * LEASE_BYTES / READ_UNIT_BYTES)
    return (
        Step(
            name="insert row",
            why="tasks are inserted in batches of 25",
            calls=1 / 25,
            write_units=1,
        ),
        Step(name="send ref", why="refs are sent in batches of ten", calls=0.1, is_sqs=True),
        Step(
            name="receive",
            why=f"up to ten messages a receive, and each message {receives} times",
            calls=receives / 10,
            is_sqs=True,
        ),
        Step(
            name="count leases",
            why="at each receive, a consistent count of the job's live leases",
            calls=receives,
            read_units=receives * counted,
        ),
        Step(
            name="bounce",
            why="at the cap the message is made visible again",
            calls=receives - 1,
            is_sqs=True,
        ),
        Step(
            name="insert lease",
            why="below the cap one row is inserted per message",
            calls=1,
            write_units=1,
        ),
        Step(
            name="heartbeat",
            why="every 10 s, so that the lease does not expire",
            calls=page_s / BEAT_S,
            write_units=page_s / BEAT_S,
        ),
        Step(
            name="load task",
            why="the task is read first, and skipped if it has ended",
            calls=1,
            read_units=0.5,
        ),
        Step(
            name="flip",
            why="a conditional write sets the status to processing",
            calls=1,
            write_units=1,
        ),
        Step(name="store body", why="the body is stored in S3", calls=1, is_s3=True),
        Step(name="settle", why="the task's outcome is a separate write", calls=1, write_units=1),
        Step(
            name="ADD stats",
            why="the run's counters are another separate write",
            calls=1,
            write_units=1,
        ),
        Step(name="release lease", why="the row of the lease is deleted", calls=1, write_units=1),
        Step(name="ack", why="the message is deleted", calls=1, is_sqs=True),
    )
