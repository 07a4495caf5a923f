"""Mutants of packs on S3: wrong offsets, packs that are not stored, packs of several runs
(docs/storage.md, S3 objects)."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import Any

import msgspec
import trio

from conveyor.engines.packed_key import Part
from conveyor.ports.blobs import Stored
from conveyor.ports.errors import Unavailable
from conveyor.simulation.models.fault_rates import FaultRates, S3Faults
from conveyor.simulation.swaps import swap
from tests.mutants.mutant import Mutant

_PACKS = "conveyor.engines.aws.packs"
_AWS = ("aws",)


def _offset_one_byte_early(append: Any) -> Any:
    def mutated(self: Any, body: bytes) -> Part:
        part: Part = append(self, body)
        return msgspec.structs.replace(part, offset=max(part.offset - 1, 0))

    return mutated


def _wait_for_first_only(add: Any) -> Any:
    async def mutated(self: Any, prefix: str, body: bytes) -> Stored:
        pack = self._open.get(prefix)
        if pack is None or not pack.has_room(len(body)):
            stored: Stored = await add(self, prefix, body)
            return stored
        part = pack.append(body)
        await trio.lowlevel.checkpoint()
        return Stored(part.key, part.size_bytes, hashlib.sha256(body).hexdigest())

    return mutated


def _use_any_open_pack(add: Any) -> Any:
    async def mutated(self: Any, prefix: str, body: bytes) -> Stored:
        stored: Stored = await add(self, next(iter(self._open), prefix), body)
        return stored

    return mutated


def _forget_failures(send: Any) -> Any:
    async def mutated(self: Any, pack: Any) -> None:
        with suppress(Unavailable):
            await send(self, pack)

    return mutated


def _reuse_one_name(pack_for: Any) -> Any:
    def mutated(self: Any, prefix: str, size_bytes: int) -> Any:
        pack = pack_for(self, prefix, size_bytes)
        pack.name = "0" * 16
        return pack

    return mutated


MUTANTS = (
    Mutant(
        name="pack_part_at_wrong_offset",
        window=54,
        invariants=(18, 55),
        what="The key of a part has an offset one byte before its body.",
        apply=swap(f"{_PACKS}:_Pack.append", _offset_one_byte_early),
        engines=_AWS,
    ),
    Mutant(
        name="settled_before_pack_is_stored",
        window=53,
        invariants=(18,),
        what="Only the first body of a pack waits until the pack is stored.",
        apply=swap(f"{_PACKS}:Packs.add", _wait_for_first_only),
        engines=_AWS,
    ),
    Mutant(
        name="pack_of_several_runs",
        window=78,
        invariants=(18, 33),
        what="A body is appended to any open pack, even one of another run.",
        apply=swap(f"{_PACKS}:Packs.add", _use_any_open_pack),
        engines=_AWS,
    ),
    Mutant(
        name="pack_failure_forgotten",
        window=53,
        invariants=(18,),
        what="A pack that S3 did not accept counts as stored.",
        apply=swap(f"{_PACKS}:Packs._send", _forget_failures),
        engines=_AWS,
        world={"service_rates": FaultRates(s3=S3Faults(slow_down_rate=0.6))},
    ),
    Mutant(
        name="pack_name_used_again",
        window=54,
        invariants=(18, 55),
        what="All packs of a run have one name, so a later one replaces an earlier one.",
        apply=swap(f"{_PACKS}:Packs._pack_for", _reuse_one_name),
        engines=_AWS,
    ),
)
