"""Identities: ULIDs for jobs and runs, hashes of the input for tasks, and the shard of
a task (SPEC.md 2.2, 2.4)."""

from __future__ import annotations

import hashlib
import hmac
import re
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import NewType, Protocol

from conveyor.domain import limits

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


class Random(Protocol):
    """Randomness is an argument: the part of `random.Random` that the domain uses."""

    def uniform(self, a: float, b: float, /) -> float: ...

    def getrandbits(self, k: int, /) -> int: ...


def mint_ulid(now_s: float, random: Random) -> str:
    """Returns a ULID of 26 characters: 48 bits of milliseconds, then 80 random bits. ULIDs sort by
    time.
    """
    return _ulid(now_s, random.getrandbits(80))


class Minter:
    """Mints ULIDs in ascending order, even if the clock is set back.

    `floor` is the newest known id. While the clock is earlier than the floor, new ids continue from
    the floor. After a step of 40 days back, ids contain a future time, but lists stay in order.
    """

    def __init__(self) -> None:
        self.floor = ""

    def mint(self, now_s: float, random: Random) -> str:
        rest = random.getrandbits(80)
        minted = _ulid(now_s, rest)
        if minted <= self.floor:
            # A random distance, so that a caller cannot guess the next id.
            minted = _spelt(_number_of(self.floor) + 1 + (rest & (2**64 - 1)))
        self.floor = minted
        return minted

    def raise_floor(self, ulid: str) -> None:
        """Makes all later ids sort after `ulid`."""
        self.floor = max(self.floor, ulid)


def fire_id(job_id: JobId, nominal_at: float) -> RunId:
    """Returns the run id for a nominal time. Every process that fires it gets the same id, so that
    only one run is created.
    """
    digest = hashlib.sha256(f"{job_id}:{int(nominal_at)}".encode()).digest()
    return RunId(_ulid(nominal_at, int.from_bytes(digest[:10])))


def _ulid(at_s: float, rest: int) -> str:
    return _spelt((int(at_s * 1000) << 80) | rest)


def _spelt(number: int) -> str:
    return "".join(_CROCKFORD[(number >> shift) & 31] for shift in range(125, -1, -5))


_ULID_MASK = (1 << 128) - 1


def _number_of(ulid: str) -> int:
    number = 0
    for character in ulid:
        number = number * 32 + _CROCKFORD.index(character)
    return number


def ulid_number(ulid: str) -> int:
    """Returns the 128 bits of a ULID."""
    return _number_of(ulid) & _ULID_MASK


def minted_at(ulid: str) -> float:
    """Returns the time in a ULID, to the millisecond."""
    return _number_of(ulid[:10]) / 1000


def is_ulid(text: str) -> bool:
    return _ULID.match(text) is not None


def is_task_id(text: str) -> bool:
    return _TASK_ID.match(text) is not None


def task_id(run_id: RunId, batch_id: BatchId, index: int) -> TaskId:
    """Returns the id of a line. Every attempt to ingest the same line gets the same id."""
    return TaskId(hashlib.sha256(f"{run_id}:{batch_id}:{index}".encode()).hexdigest()[:32])


def task_ids(run_id: RunId, batch_id: BatchId, indexes: Iterable[int]) -> list[TaskId]:
    """As `task_id`, for many lines of a batch."""
    head, sha256 = f"{run_id}:{batch_id}:", hashlib.sha256
    return [TaskId(sha256(f"{head}{index}".encode()).hexdigest()[:32]) for index in indexes]


def caller_id(api_key: str, secret: bytes) -> CallerId:
    """Returns the name of a key's owner. The key cannot be recovered from it."""
    return CallerId(hmac.new(secret, api_key.encode(), hashlib.sha256).hexdigest()[:32])


def notice_id(run_id: RunId, event_type: str) -> NoticeId:
    """Returns one id per run and event type, so that a repeated change writes one notice."""
    return NoticeId(hashlib.sha256(f"{run_id}:{event_type}".encode()).hexdigest()[:26].upper())


def event_id(subject: str, event_type: str) -> EventId:
    """Returns one id per subject and type, so that a repeated change writes one event."""
    return EventId(hashlib.sha256(f"{subject}:{event_type}".encode()).hexdigest()[:32])


# The shard of a task follows from its id. The number of shards is fixed when the job is created
# (SPEC.md 2.4).
#
# The constants of FNV-1a with 32 bits. Stored rows depend on them: a change would lose tasks.
_BASIS, _PRIME, _BITS = 0x811C9DC5, 0x01000193, 0xFFFFFFFF
_SHARD_BYTES = 8  # A product of 32 bits and 25 bits fits into 8 bytes.


def shard_of(task_id: TaskId, shard_count: int) -> int:
    """Returns FNV-1a of the id modulo the number of shards. One shard needs no hash."""
    if shard_count == 1:
        return 0
    value = _BASIS
    for byte in task_id.encode():
        value = ((value ^ byte) * _PRIME) & _BITS
    return value % shard_count


def shards_of(task_ids: Sequence[TaskId], shard_count: int) -> list[int]:
    """As `shard_of` for many ids of one length, in an eighth of the time.

    One large integer holds the hashes of all ids, 8 bytes each. Every step of the hash is one
    operation on that integer.
    """
    count = len(task_ids)
    if shard_count == 1 or not count:
        return [0] * count
    columns, width = "".join(task_ids).encode(), len(task_ids[0])
    assert all(len(task_id) == width for task_id in task_ids), "ids of several lengths"
    shards = bytearray(_SHARD_BYTES * count)
    ones = int.from_bytes((1).to_bytes(_SHARD_BYTES, "little") * count, "little")
    value, mask = ones * _BASIS, ones * _BITS
    for place in range(width):
        shards[::_SHARD_BYTES] = columns[place::width]
        value = ((value ^ int.from_bytes(shards, "little")) * _PRIME) & mask
    hashes = struct.unpack(f"<{count}Q", value.to_bytes(len(shards), "little"))
    return [value % shard_count for value in hashes]


def counter_shard_of(worker: str, shard_count: int) -> int:
    """Returns the shard on whose counter row a worker counts the tasks that it ends."""
    return zlib.crc32(worker.encode()) % shard_count


def pin_shard_count(*, tasks_count: int, is_open: bool, configured: int, sync_max: int) -> int:
    """Small closed jobs get one shard, which is cheap to read. Large or open jobs get several."""
    assert 1 <= configured <= limits.TASK_SHARD_COUNT_MAX
    return configured if is_open or tasks_count >= sync_max else 1
