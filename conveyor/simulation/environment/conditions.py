"""Special conditions of a world, drawn apart from its fault rates (docs/simulator.md, Profiles).

They are: a gateway with a concurrency limit, outages or false headers; body storage that is full,
missing or forbidden; hostile callers and sites; wall clocks that leap; input that crashes its
handler; a lack of file descriptors; and power cuts. Two worlds of five have one or two of them. In
most of these worlds nothing else happens to engines, processes and clocks, so that the conditions
must explain each paid call and each failed task.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import msgspec

from conveyor.simulation.profiles import without_internal_faults

if TYPE_CHECKING:
    from conveyor.simulation.options import Options

# The share of worlds with special conditions; the share of these in which nothing else happens; and
# the share of these with a second condition.
CONDITIONS_SHARE = 0.4
ISOLATED_SHARE = 0.6
SECOND_CONDITION_SHARE = 0.3
ISOLATED_S = 60.0
"""Without other faults clients make fast progress: a short time is as much work as elsewhere."""

SLOTS = 50
"""With few slots, every page that takes ten seconds would delay all callers, and fairness could not
be measured."""

HOUR_S, DAY_S = 3600.0, 86_400.0
# Longer than leases and claims, than results kept for a day, and than results kept for a month.
LEAPS_S = (HOUR_S, DAY_S, 40 * DAY_S)


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """Each `..._every_s` is the mean time between two events, 0 for none. `gateway_plan` is the
    number of concurrent calls that the gateway allows a key; 0 if it states no limit. `poisons` are
    the kinds of input that crash their handler, `hostile` is what the hostile caller does, `quotas`
    are those of each caller. `shortage_rate` is the probability that a fetch finds no file
    descriptor. `is_isolated` means that nothing else happens to engines, processes and clocks."""

    storage_outage_every_s: float = 0.0
    gateway_outage_every_s: float = 0.0
    gateway_plan: int = 0
    gateway_lies: bool = False
    clock_leap_s: float = 0.0
    power_cut_every_s: float = 0.0
    poisons: tuple[str, ...] = ()
    hostile: str = ""
    quotas: dict[str, int] = {}
    shortage_rate: float = 0.0
    is_isolated: bool = False

    @property
    def measures_fairness(self) -> bool:
        """Whether only a hostile caller can delay the jobs of others."""
        alone = Conditions(hostile=self.hostile, quotas=self.quotas, is_isolated=True)
        return bool(self.hostile) and self == alone


POISONS = ("task",)
HOSTILE = (
    "late_answers",
    "odd_values",
    "over_quotas",
    "tar_pits",
    "idle_jobs",
    "endless_reruns",
)
# Quotas that a hostile caller reaches within the short time of such a world.
TIGHT = {"live_runs": 8, "open_jobs": 5, "exports_per_run": 3, "upload_slots": 6}
KINDS = (
    "storage",
    "gateway_outage",
    "plan",
    "lies",
    "poison",
    "hostile",
    "hostile",
    "power",
    "leap",
    "shortage",
)
_OF_GATEWAYS = frozenset({"gateway_outage", "plan", "lies"})
# These conditions affect the process or its engine, so the world is not free of internal faults.
_INTERNAL = frozenset({"storage", "leap", "power", "poison", "shortage"})


def with_conditions(options: Options) -> Options:
    """Draws the special conditions of a world from a random stream of their own."""
    # The name of a stream decides what it draws: another name would change every recorded world.
    random = Random(f"neighbours {options.seed}")
    if random.random() >= CONDITIONS_SHARE:
        return options
    kinds = {random.choice(KINDS)}
    if random.random() < SECOND_CONDITION_SHARE:
        kinds.add(random.choice(KINDS))
    has_gateway = options.has_gateway or bool(kinds & _OF_GATEWAYS) or random.random() < 0.5
    is_isolated = random.random() < ISOLATED_SHARE
    conditions = _draw(random, kinds, is_isolated=is_isolated or options.is_fault_free)
    if is_isolated:
        options = without_internal_faults(options)
    measures = conditions.measures_fairness
    return msgspec.structs.replace(
        options,
        conditions=conditions,
        has_gateway=has_gateway,
        concurrency=SLOTS if measures else options.concurrency,
        is_fault_free=options.is_fault_free and not kinds & _INTERNAL,
        safety_s=ISOLATED_S if is_isolated else options.safety_s,
    )


def _draw(random: Random, kinds: set[str], *, is_isolated: bool) -> Conditions:
    hostile = random.choice(HOSTILE) if "hostile" in kinds else ""
    return Conditions(
        storage_outage_every_s=random.choice((20.0, 60.0)) if "storage" in kinds else 0.0,
        gateway_outage_every_s=random.choice((20.0, 60.0)) if "gateway_outage" in kinds else 0.0,
        gateway_plan=random.choice((1, 3, 10)) if kinds & {"plan", "lies"} else 0,
        gateway_lies="lies" in kinds,
        clock_leap_s=random.choice(LEAPS_S) if "leap" in kinds else 0.0,
        power_cut_every_s=40.0 if "power" in kinds else 0.0,
        poisons=(random.choice(POISONS),) if "poison" in kinds else (),
        hostile=hostile,
        quotas=TIGHT if hostile == "over_quotas" else {},
        shortage_rate=random.choice((0.05, 0.3)) if "shortage" in kinds else 0.0,
        is_isolated=is_isolated,
    )
