"""Identities: ULIDs for jobs and runs, a function of the input for tasks (SPEC.md 2.2)."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from typing import NewType

from conveyor.domain.randomness import Random

CallerId = NewType("CallerId", str)
JobId = NewType("JobId", str)
RunId = NewType("RunId", str)
TaskId = NewType("TaskId", str)
BatchId = NewType("BatchId", str)
LeaseId = NewType("LeaseId", str)
NoticeId = NewType("NoticeId", str)
EventId = NewType("EventId", str)
ExportId = NewType("ExportId", str)
InputId = NewType("InputId", str)

ULID_PATTERN = "^[0-9A-HJKMNP-TV-Z]{26}$"
TASK_ID_PATTERN = "^[A-Za-z0-9._-]{1,128}$"
FIRST_BATCH = BatchId("0")

_ULID = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}\Z")
_TASK_ID = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")
_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def mint_ulid(now_s: float, random: Random) -> str:
    """A 26-character ULID: 48 bits of milliseconds, then 80 random bits; sorts by time."""
    return _ulid(now_s, random.getrandbits(80))


class Minter:
    """Mints ULIDs each of which sorts behind all before it, whatever the clock does.

    `floor` is the newest that is known. While the clock shows an earlier time than that, ids go on
    from there; a step of 40 days back so gives ids of a time to come, but keeps lists in order.
    """

    def __init__(self) -> None:
        self.floor = ""

    def mint(self, now_s: float, random: Random) -> str:
        rest = random.getrandbits(80)
        minted = _ulid(now_s, rest)
        if minted <= self.floor:
            # Far enough from the last that nobody guesses the next.
            minted = _spelt(_number_of(self.floor) + 1 + (rest & (2**64 - 1)))
        self.floor = minted
        return minted

    def raise_floor(self, ulid: str) -> None:
        """From here on all that is minted sorts behind this one."""
        self.floor = max(self.floor, ulid)


def fire_id(job_id: JobId, nominal_at: float) -> RunId:
    """The run that a schedule makes for a nominal time, whoever fires it and however often."""
    digest = hashlib.sha256(f"{job_id}:{int(nominal_at)}".encode()).digest()
    return RunId(_ulid(nominal_at, int.from_bytes(digest[:10])))


def _ulid(at_s: float, rest: int) -> str:
    return _spelt((int(at_s * 1000) << 80) | rest)


def _spelt(number: int) -> str:
    return "".join(_CROCKFORD[(number >> shift) & 31] for shift in range(125, -1, -5))


def _number_of(ulid: str) -> int:
    number = 0
    for each in ulid:
        number = number * 32 + _CROCKFORD.index(each)
    return number


def minted_at(ulid: str) -> float:
    """When it was made, to the millisecond."""
    return _number_of(ulid[:10]) / 1000


def is_ulid(text: str) -> bool:
    return _ULID.match(text) is not None


def is_task_id(text: str) -> bool:
    return _TASK_ID.match(text) is not None


def task_id(run_id: RunId, batch_id: BatchId, index: int) -> TaskId:
    """The same line of the same batch has the same id on every attempt to ingest it."""
    return TaskId(hashlib.sha256(f"{run_id}:{batch_id}:{index}".encode()).hexdigest()[:32])


def task_ids(run_id: RunId, batch_id: BatchId, indexes: Iterable[int]) -> list[TaskId]:
    """The same for many lines of a batch."""
    head, sha256 = f"{run_id}:{batch_id}:", hashlib.sha256
    return [TaskId(sha256(f"{head}{index}".encode()).hexdigest()[:32]) for index in indexes]


def caller_id(api_key: str, secret: bytes) -> CallerId:
    """Names the owner of a key without keeping the key."""
    return CallerId(hmac.new(secret, api_key.encode(), hashlib.sha256).hexdigest()[:32])


def notice_id(run_id: RunId, event_type: str) -> NoticeId:
    """One notice per run and event, however often the flip is tried."""
    return NoticeId(hashlib.sha256(f"{run_id}:{event_type}".encode()).hexdigest()[:26].upper())


def event_id(subject: str, event_type: str) -> EventId:
    """One event per subject and type, however often the change is tried."""
    return EventId(hashlib.sha256(f"{subject}:{event_type}".encode()).hexdigest()[:32])
