"""Neighbours: what stands beside the engines and the ordinary callers of a world (SPEC 6.14).

A gateway with a plan, outages and false headers; a storage of bodies that is full, missing or
closed to us; callers and sites that mean harm; wall clocks that leap; input that crashes its
handler; and power cuts. Two worlds of five have one or two of them. Most of these are orderly
otherwise: nothing else happens to engines, processes and clocks, so that each paid call and each
failed task must be explained by the outside.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import msgspec

from conveyor.simulation.moods import spared

if TYPE_CHECKING:
    from conveyor.simulation.options import Options

SHARE = 0.4
ORDERLY = 0.6
SECOND = 0.3
ORDERLY_S = 60.0
"""Clients get far where nothing holds them up: a short time is as much work as elsewhere."""

HOUR_S, DAY_S = 3600.0, 86_400.0
LEAPS_S = (HOUR_S, DAY_S, 40 * DAY_S)


class Neighbours(msgspec.Struct, frozen=True, kw_only=True):
    """`..._every_s` is the mean time between two events, 0 where there are none. `gateway_plan` is
    how many calls a key may have at the gateway at once; 0 where the gateway states no limit.
    `poisons` are the kinds of input that crash their handler, `hostile` is what a hostile caller
    does. In an orderly world nothing else happens to engines, processes and clocks."""

    storage_outage_every_s: float = 0.0
    gateway_outage_every_s: float = 0.0
    gateway_plan: int = 0
    gateway_lies: bool = False
    clock_leap_s: float = 0.0
    power_cut_every_s: float = 0.0
    poisons: tuple[str, ...] = ()
    hostile: str = ""
    is_orderly: bool = False


POISONS = ("task",)
HOSTILE = ("late_answers",)
KINDS = ("storage", "gateway_outage", "plan", "lies", "poison", "hostile", "power")
_OF_GATEWAYS = frozenset({"gateway_outage", "plan", "lies"})
# These happen to the process and its engine, so the world is not spared.
_INSIDE = frozenset({"storage", "leap", "power", "poison"})


def with_neighbours(options: Options) -> Options:
    """The world with its neighbours, drawn apart from everything else that the seed decides."""
    random = Random(f"neighbours {options.seed}")
    if random.random() >= SHARE:
        return options
    kinds = {random.choice(KINDS)}
    if random.random() < SECOND:
        kinds.add(random.choice(KINDS))
    has_gateway = options.has_gateway or bool(kinds & _OF_GATEWAYS) or random.random() < 0.5
    is_orderly = random.random() < ORDERLY
    neighbours = _draw(random, kinds, is_orderly=is_orderly or options.is_spared)
    if is_orderly:
        options = spared(options)
    return msgspec.structs.replace(
        options,
        neighbours=neighbours,
        has_gateway=has_gateway,
        is_spared=options.is_spared and not kinds & _INSIDE,
        safety_s=ORDERLY_S if is_orderly else options.safety_s,
    )


def _draw(random: Random, kinds: set[str], *, is_orderly: bool) -> Neighbours:
    return Neighbours(
        storage_outage_every_s=random.choice((20.0, 60.0)) if "storage" in kinds else 0.0,
        gateway_outage_every_s=random.choice((20.0, 60.0)) if "gateway_outage" in kinds else 0.0,
        gateway_plan=random.choice((1, 3, 10)) if kinds & {"plan", "lies"} else 0,
        gateway_lies="lies" in kinds,
        clock_leap_s=random.choice(LEAPS_S) if "leap" in kinds else 0.0,
        power_cut_every_s=40.0 if "power" in kinds else 0.0,
        poisons=(random.choice(POISONS),) if "poison" in kinds else (),
        hostile=random.choice(HOSTILE) if "hostile" in kinds else "",
        is_orderly=is_orderly,
    )
