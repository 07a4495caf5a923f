"""Keys: the place of every row kind in the table, and its index attributes
(docs/storage.md, DynamoDB table).

An index partition is a row kind, the row's status as stored, and a bucket. This module names no
status: queries name them. A pointer is a second, small item that orders rows by another field than
their key. An index could do that too, but reads of an index are eventually consistent, and reads of
a pointer are consistent.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from conveyor.domain.changes import (
    KIND_OF_KEY,
    ROW_KINDS,
    AnyKey,
    BatchKey,
    CrawlKey,
    CrawlStepKey,
    CrossingKey,
    EventKey,
    Expiry,
    ExportKey,
    InputKey,
    JobKey,
    NoticeKey,
    RecordKey,
    RunKey,
    SampleKey,
    ScheduleKey,
    ScrubKey,
    StatsKey,
    TaskKey,
)

PK, SK, TTL = "pk", "sk", "ttl"
TARGET = "of"
"""The attribute of a pointer that contains the place of its row."""
# Partitions of an index per kind and status. More buckets accept more writes. But each one is a
# query of its own for every search of due rows, and all workers search all the time.
BUCKETS, HOT_BUCKETS = 2, 8
_HOT_KINDS = frozenset({"Event", "Key", "Notice", "Run"})
# The sweeper removes the blobs of these rows first, and then the row. DynamoDB's own expiry must
# not remove a row before its blobs, so it only takes rows that the sweeper did not reach in a week.
_BLOB_GRACE_S = 7 * 24 * 3600.0

Place = tuple[str, str]
Fields = Mapping[str, Any]


class Index(NamedTuple):
    name: str
    pk: str
    sk: str


BY_OWNER = Index("GSI1", "g1", "g1s")
BY_TIME = Index("GSI2", "g2", "g2s")
INDEXES = (BY_OWNER, BY_TIME)


def item_key(key: AnyKey) -> Place:
    """Returns the partition and the sort key of a row.

    The sort key is the name of the kind and the fields that the partition does not contain. Tasks
    and counters are in one partition per shard; other rows are with their job or their caller, or
    alone.
    """
    name = KIND_OF_KEY[type(key)].name
    match key:
        case TaskKey():
            return shard(key.job_id, key.shard), f"{name}#{key.run_id}#{key.task_id}"
        case StatsKey():
            return shard(key.job_id, key.shard), f"{name}#{key.run_id}"
        case SampleKey():
            # Leading zeros, because DynamoDB sorts keys as texts.
            return job(key.job_id), f"{name}#{key.run_id}#{key.minute:010d}"
        case CrawlStepKey():
            return job(key.job_id), crawl_step(key.run_id, key.number)
    owner, *rest = msgspec.structs.astuple(key)
    match key.__struct_fields__[0]:
        case "job_id":
            return job(owner), "#".join([name, *rest])
        case "caller":
            return caller(owner), "#".join([name, *rest])
        case _:
            return f"{name}#{owner}", name


def crawl_step(run_id: str, number: int) -> str:
    # Leading zeros, because DynamoDB sorts keys as texts.
    return f"CrawlStep#{run_id}#{number:010d}"


def job(job_id: str) -> str:
    return f"Job#{job_id}"


def shard(job_id: str, number: int) -> str:
    return f"Job#{job_id}#TS{number}"


def caller(name: str) -> str:
    return f"Caller#{name}"


def stamp(instant: float) -> str:
    """Returns a text that sorts like the instant. Nine decimals distinguish any two floats of
    today."""
    return f"{max(instant, 0.0):021.9f}"


def _bucket_count(kind: str) -> int:
    return HOT_BUCKETS if kind in _HOT_KINDS else BUCKETS


def bucket_of(kind: str, name: str) -> int:
    # Not `hash`: it differs between processes, and all of them must compute the same bucket.
    return zlib.crc32(name.encode()) % _bucket_count(kind)


def buckets(kind: str, *labels: str) -> list[str]:
    """Returns the index partitions of the rows of a kind with these labels."""
    numbers = range(_bucket_count(kind))
    return [f"{kind}#{label}#{number}" for label in sorted(labels) for number in numbers]


class Derived(NamedTuple):
    """An index attribute that `make` computes from the key and these fields; None to omit it."""

    attribute: str
    fields: frozenset[str]
    make: Callable[[Fields], str | None]


class Pointer(NamedTuple):
    """The place of a row's pointer, which `make` computes from the key and one field."""

    field: str
    make: Callable[[Fields], Place | None]


def _in_bucket(kind: str, name: str, label: str = "") -> Callable[[Fields], str]:
    """`label` is the field that selects the partition, usually the status."""
    return lambda row: f"{kind}#{row[label] if label else ''}#{bucket_of(kind, row[name])}"


def _index_by_time(
    kind: str, due: str, *names: str, label: str = "", index: Index = BY_TIME
) -> tuple[Derived, ...]:
    """Orders a kind in an index by an instant, then by `names`. Rows without the instant are not
    in the index."""

    def sort(row: Fields) -> str | None:
        at = row[due]
        return None if at is None else "#".join([stamp(at), *(str(row[name]) for name in names)])

    follows = frozenset({label} if label else ())
    partition = _in_bucket(kind, names[0], label)
    return Derived(index.pk, follows, partition), Derived(index.sk, frozenset({due}), sort)


def _external(row: Fields) -> str | None:
    return external(row["caller"], row["external_id"]) if row["external_id"] is not None else None


def external(caller_id: str, name: str) -> str:
    return f"External#{caller_id}#{name}"


def _job_of(row: Fields) -> str | None:
    return None if row["job_id"] is None else job(row["job_id"])


def _placing(row: Fields) -> str:
    return f"Event#{'placed' if row['seq'] else 'new'}#{bucket_of('Event', row['event_id'])}"


_FIXED: frozenset[str] = frozenset()

DERIVED: dict[type, tuple[Derived, ...]] = {
    JobKey: (
        Derived(BY_OWNER.pk, _FIXED, lambda row: caller(row["caller"])),
        Derived(BY_OWNER.sk, _FIXED, lambda row: row["job_id"]),
        Derived(BY_TIME.pk, _FIXED, _external),
        Derived(BY_TIME.sk, _FIXED, lambda row: _external(row) and row["job_id"]),
    ),
    RunKey: (
        *_index_by_time("Run", "updated_at", "run_id", label="status"),
        # No query finds runs by their owner, so runs use that index for a second instant.
        *_index_by_time("Expiry", "sweep_at", "run_id", index=BY_OWNER),
    ),
    BatchKey: _index_by_time("Batch", "updated_at", "run_id", "batch_id", label="status"),
    NoticeKey: _index_by_time("Notice", "due_at", "notice_id", label="status"),
    ScrubKey: _index_by_time("Scrub", "due_at", "scrub_id"),
    CrossingKey: _index_by_time("Crossing", "made_at", "job_id"),
    ScheduleKey: _index_by_time("Schedule", "next_fire_at", "job_id", label="status"),
    ExportKey: _index_by_time("Export", "due_at", "export_id"),
    CrawlKey: _index_by_time("Crawl", "due_at", "job_id"),
    InputKey: _index_by_time("Input", "expires_at", "input_id"),
    RecordKey: _index_by_time("Key", "expires_at", "key_id"),
    EventKey: (
        Derived(BY_OWNER.pk, _FIXED, _job_of),
        Derived(BY_OWNER.sk, _FIXED, lambda row: _job_of(row) and _event_place(row)),
        Derived(BY_TIME.pk, frozenset({"seq"}), _placing),
        Derived(BY_TIME.sk, _FIXED, lambda row: f"{stamp(row['occurred_at'])}#{row['event_id']}"),
    ),
}


def _event_place(row: Fields) -> str:
    return f"Event#{row['run_id'] or ''}#{row['event_id']}"


def notice_pointer(run_id: str, occurred_at: float, notice_id: str) -> str:
    return f"Notice#{run_id}#{stamp(occurred_at)}#{notice_id}"


def sequence_pointer(sequence: int) -> str:
    # Leading zeros, because DynamoDB sorts keys as texts.
    return f"Sequence#{sequence:010d}"


def seq_pointer(seq: int) -> str:
    return f"Seq#{seq:015d}"


def _event_pointer(row: Fields) -> Place | None:
    return (caller(row["caller"]), seq_pointer(row["seq"])) if row["seq"] else None


def _notice_pointer(row: Fields) -> Place:
    sort = notice_pointer(row["run_id"], row["occurred_at"], row["notice_id"])
    return job(row["job_id"]), sort


POINTERS: dict[type, Pointer] = {
    RunKey: Pointer(
        "sequence", lambda row: (job(row["job_id"]), sequence_pointer(row["sequence"]))
    ),
    NoticeKey: Pointer("occurred_at", _notice_pointer),
    EventKey: Pointer("seq", _event_pointer),
}

EXPIRING: dict[type, float] = {
    kind.key_type: 0.0 if kind.expiry is Expiry.STORE else _BLOB_GRACE_S
    for kind in ROW_KINDS
    if kind.expiry is not None
}
"""Kinds that DynamoDB's own expiry removes, so many seconds after their `expires_at`."""
