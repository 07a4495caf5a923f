"""Identities: ULIDs for jobs and runs, a function of the input for tasks (SPEC 2.2)."""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import NewType

from conveyor.domain.randomness import Random

CallerId = NewType("CallerId", str)
JobId = NewType("JobId", str)
RunId = NewType("RunId", str)
TaskId = NewType("TaskId", str)
BatchId = NewType("BatchId", str)
LeaseId = NewType("LeaseId", str)
NoticeId = NewType("NoticeId", str)
InputId = NewType("InputId", str)

ULID_PATTERN = "^[0-9A-HJKMNP-TV-Z]{26}$"
TASK_ID_PATTERN = "^[A-Za-z0-9._-]{1,128}$"
FIRST_BATCH = BatchId("0")

_ULID = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}\Z")
_TASK_ID = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")
_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def mint_ulid(now_s: float, random: Random) -> str:
    """A 26-character ULID: 48 bits of milliseconds, then 80 random bits; sorts by time."""
    number = (int(now_s * 1000) << 80) | random.getrandbits(80)
    return "".join(_CROCKFORD[(number >> shift) & 31] for shift in range(125, -1, -5))


def is_ulid(text: str) -> bool:
    return _ULID.match(text) is not None


def is_task_id(text: str) -> bool:
    return _TASK_ID.match(text) is not None


def task_id(run_id: RunId, batch_id: BatchId, index: int) -> TaskId:
    """The same line of the same batch has the same id on every attempt to ingest it."""
    return TaskId(hashlib.sha256(f"{run_id}:{batch_id}:{index}".encode()).hexdigest()[:32])


def caller_id(api_key: str, secret: bytes) -> CallerId:
    """Names the owner of a key without keeping the key."""
    return CallerId(hmac.new(secret, api_key.encode(), hashlib.sha256).hexdigest()[:32])


def notice_id(run_id: RunId, event_type: str) -> NoticeId:
    """One notice per run and event, however often the flip is tried."""
    return NoticeId(hashlib.sha256(f"{run_id}:{event_type}".encode()).hexdigest()[:26].upper())
