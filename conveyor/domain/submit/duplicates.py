"""Duplicates: lines of one list that ask for the same response and share one fetch (SPEC.md 4.23).

The first line of each group is the original. Its task id is a hash of what the group has in common,
so that any later line of the list finds the original by computing its id. The tasks are therefore
the only index that is needed, however long the list is, and every attempt to ingest the list names
the same originals.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Mapping, Sequence

import msgspec

from conveyor.domain.ids import BatchId, RunId, TaskId
from conveyor.domain.model import TaskSpec
from conveyor.domain.submit.admission import Identity, Secrets, identities_by_index
from conveyor.domain.submit.url_normalization import normalize_url

_ENCODER = msgspec.json.Encoder(order="sorted")

Origin = tuple[RunId, BatchId]


def request_of(spec: TaskSpec, secrets: Secrets) -> str:
    """Returns a text that two lines have in common if they ask for the same response: normalised
    URL, method, body, and the parameters and headers that the lines have of their own."""
    body = b64encode(secrets.body).decode() if secrets.body is not None else None
    return _ENCODER.encode(
        [
            normalize_url(spec.url) or spec.url,
            spec.method,
            body,
            secrets.content_type,
            spec.params or {},
            secrets.headers or {},
        ]
    ).decode()


def original_id(origin: Origin, group: str) -> TaskId:
    """Returns the task id of the first line of a group. No index of a line begins with `=`."""
    run_id, batch_id = origin
    return TaskId(hashlib.sha256(f"{run_id}:{batch_id}:={group}".encode()).hexdigest()[:32])


def identities_of(
    specs: Sequence[TaskSpec],
    groups: Sequence[str | None],
    origin: Origin,
    known: Mapping[TaskId, int],
) -> list[Identity]:
    """Returns the identities of consecutive lines. A line without a group is no duplicate.

    `known` has the positions of originals in earlier lines, and of those in these lines that an
    interrupted ingest has stored already.
    """
    first_at = dict(known)
    identities = identities_by_index(specs, origin)
    for number, (spec, group) in enumerate(zip(specs, groups, strict=True)):
        if group is None:
            continue
        original = original_id(origin, group)
        is_original = first_at.setdefault(original, spec.index) == spec.index
        own_id = identities[number].task_id
        identities[number] = Identity(original) if is_original else Identity(own_id, original)
    return identities
