"""The reference design as data: what one task costs, step by step, as its description says.

Reckoned kindly where they are silent: every row fits into one write unit, no write is refused or
tried again, whatever can go in a batch does, and the event rows that they keep beside their tasks
are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import msgspec

from conveyor.engines.aws.client import usage
from conveyor.engines.aws.client.usage import READ_UNIT_BYTES

BEAT_S = 10.0
LEASE_BYTES = 110
"""A partition, a sort key and an expiry."""

RECEIVES = {"best": 1.59, "mean": 2.74, "worst": 4.65, "ungated": 9.7}
"""Receives of each message: three runs that they made with their gate, and the lower of the figures
that they had seen without it."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What one task takes of one step, and which sentence of theirs says so."""

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


def seeds_path(*, inflight: int, page_s: float, receives: float) -> Sequence[Step]:
    """A task of a job at its cap of `inflight`, whose pages take `page_s`."""
    counted = ceil(inflight * LEASE_BYTES / READ_UNIT_BYTES)
    return (
        Step(name="insert row", why="tasks go in by batches of 25", calls=1 / 25, write_units=1),
        Step(name="send ref", why="and their refs by ten", calls=0.1, is_sqs=True),
        Step(
            name="receive",
            why=f"up to ten a poll, and each message {receives} times",
            calls=receives / 10,
            is_sqs=True,
        ),
        Step(
            name="count leases",
            why="each time it is received, a consistent count of the job's live leases",
            calls=receives,
            read_units=receives * counted,
        ),
        Step(
            name="bounce",
            why="at the cap it is made visible again",
            calls=receives - 1,
            is_sqs=True,
        ),
        Step(
            name="insert lease",
            why="below the cap there is one row a message",
            calls=1,
            write_units=1,
        ),
        Step(
            name="heartbeat",
            why="every 10 s, so that the lease does not age out",
            calls=page_s / BEAT_S,
            write_units=page_s / BEAT_S,
        ),
        Step(
            name="load task", why="read first, and skipped if it is over", calls=1, read_units=0.5
        ),
        Step(name="flip", why="a conditional write to processing", calls=1, write_units=1),
        Step(name="store body", why="the body goes to S3", calls=1, is_s3=True),
        Step(name="settle", why="the task's outcome is a write of its own", calls=1, write_units=1),
        Step(
            name="ADD stats", why="and so is the bump of the run's counters", calls=1, write_units=1
        ),
        Step(name="release lease", why="the row of the lease is removed", calls=1, write_units=1),
        Step(name="ack", why="the message is deleted", calls=1, is_sqs=True),
    )
