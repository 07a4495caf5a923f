"""Divides the memory for page bodies of one process (docs/deploy.md, Memory)."""

from __future__ import annotations

from actors.limiters.fair_limiter import slots_count
from conveyor.config import Settings
from conveyor.domain import limits
from conveyor.engines.system.memory_limit import container_bytes, machine_bytes
from conveyor.http_client.connection_limits import PoolLimits
from conveyor.http_client.stream import RECEIVE_BYTES

MB = 1024 * 1024
# Without a limit of a container, so that `conveyor dev` leaves the machine to other programs.
_MACHINE_MB_MAX = 1024


def body_memory_mb(settings: Settings) -> int:
    """Returns the setting, or half of the memory of the container or the machine. The other half is
    for the program (150 MB), connections, the windows of decoders and pages that are served."""
    if settings.body_memory_mb is not None:
        return settings.body_memory_mb
    container = container_bytes()
    if container is not None:
        return max(container // 2 // MB, limits.BODY_MEMORY_MB_MIN)
    return max(min(machine_bytes() // 2 // MB, _MACHINE_MB_MAX), limits.BODY_MEMORY_MB_MIN)


def body_limits(settings: Settings) -> PoolLimits:
    """Returns limits for bodies that together fit into the memory: those of every task that fetches
    or writes a page, half of the rest for medium bodies, and half for large ones."""
    defaults = PoolLimits()
    tasks_count = slots_count(settings.concurrency) + settings.concurrency
    total_bytes = body_memory_mb(settings) * MB
    # A body reserves memory after the read with which it exceeds what it may have unreserved.
    unreserved_bytes = tasks_count * (defaults.unreserved_body_bytes + RECEIVE_BYTES)
    rest_bytes = max(total_bytes - unreserved_bytes, 0)
    # A caller has half of the memory of large bodies, which must suffice for the largest.
    large_bytes = max(rest_bytes // 2, 2 * limits.BODY_BYTES_MAX)
    return PoolLimits(
        medium_bodies_bytes_max=max(rest_bytes - large_bytes, 0),
        large_bodies_bytes_max=large_bytes,
    )
