"""Models capacity: how many units per second a partition, and a table that is still cold, can take.

It is not a random fault: without any other fault, a heavy load is throttled here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil

from conveyor.simulation.models.fault_source import FaultSource

TABLE = ""
# The sizes of DynamoDB's write and read units.
WRITE_UNIT_BYTES = 1024
READ_UNIT_BYTES = 4096

Place = tuple[str, str]
"""A partition: the name of its index, empty for the table itself, and its partition key."""
Units = Mapping[Place, float]

# The partition key under which the level of a whole table or index is kept.
_ALL = ""


def write_units(size_bytes: int) -> float:
    return float(max(1, ceil(size_bytes / WRITE_UNIT_BYTES)))


def read_units(size_bytes: int, *, is_consistent: bool) -> float:
    units = float(max(1, ceil(size_bytes / READ_UNIT_BYTES)))
    return units if is_consistent else units / 2


@dataclass(slots=True)
class _Level:
    """A token bucket: the units that are left. A request may overdraw it once; it refills
    continuously."""

    left: float
    at: float


@dataclass(slots=True)
class Capacity:
    """The capacity of one table and its indexes. `written` adds up the units per partition, to show
    where the load is."""

    fault_source: FaultSource
    now: Callable[[], float]
    written: Counter[Place] = field(default_factory=Counter)
    _writes: dict[Place, _Level] = field(default_factory=dict)
    _reads: dict[Place, _Level] = field(default_factory=dict)
    _throttled_until: dict[Place, float] = field(default_factory=dict)

    def take_writes(self, units: Units) -> str | None:
        """Takes all units, or none and returns the reason: ProvisionedThroughputExceeded or
        ThrottlingError."""
        limits = self.fault_source.service_rates.dynamodb.capacity
        refusal = self._draw_throttling(units)
        if refusal is not None or limits is None:
            return refusal
        refusal = self._take(self._writes, units, limits.partition_writes, limits.table_writes)
        if refusal is None:
            self.written.update(units)
        return refusal

    def take_reads(self, units: Units) -> str | None:
        limits = self.fault_source.service_rates.dynamodb.capacity
        refusal = self._draw_throttling(units)
        if refusal is not None or limits is None:
            return refusal
        return self._take(self._reads, units, limits.partition_reads, limits.table_reads)

    def _draw_throttling(self, units: Units) -> str | None:
        """The reason to throttle, if one of the partitions is in a randomly drawn period of
        throttling."""
        faults = self.fault_source.service_rates.dynamodb
        if not faults.throttled_shard_rate:
            return None
        now = self.now()
        for partition in units:
            if self._throttled_until.get(partition, 0.0) > now:
                return "ProvisionedThroughputExceeded"
            if self.fault_source.occurs("dynamodb.throttled_shard", faults.throttled_shard_rate):
                throttled_s = self.fault_source.seconds(faults.throttled_shard_s)
                self._throttled_until[partition] = now + throttled_s
                return "ProvisionedThroughputExceeded"
        return None

    def _take(
        self, levels: dict[Place, _Level], units: Units, partition_max: float, table_max: float
    ) -> str | None:
        """Takes the units from the levels of the partitions and of each whole table or index. An
        index warms up like a table, independently of it."""
        now = self.now()
        demands = [(_level(levels, place, partition_max, now), n) for place, n in units.items()]
        whole = [
            (_level(levels, (name, _ALL), table_max, now), n) for (name, _), n in units.items()
        ]
        refusal = None
        if any(level.left <= 0.0 for level, _ in demands):
            refusal = "ProvisionedThroughputExceeded"
        elif any(level.left <= 0.0 for level, _ in whole):
            refusal = "ThrottlingError"
        if refusal is not None:
            self.fault_source.count("dynamodb.throttled")
            return refusal
        for level, count in [*demands, *whole]:
            level.left -= count
        return None


def _level(levels: dict[Place, _Level], place: Place, most: float, now: float) -> _Level:
    level = levels.get(place)
    if level is None:
        level = levels[place] = _Level(most, now)
    level.left = min(most, level.left + most * (now - level.at))
    level.at = now
    return level
