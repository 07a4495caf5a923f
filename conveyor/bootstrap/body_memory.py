"""Finds how much memory a process may use for page bodies: the limit of its container or the memory
of the machine, and divides it (docs/deploy.md, Memory)."""

from __future__ import annotations

import os
from pathlib import Path

from actors.limiters.fair_limiter import slots_count
from conveyor.config import Settings
from conveyor.domain import limits
from conveyor.engines.aws.packs import SENDING_BYTES_MAX
from conveyor.http_client.connection_limits import PoolLimits
from conveyor.http_client.stream import RECEIVE_BYTES

MB = 1024 * 1024
# Without a limit of a container, so that `conveyor dev` leaves the machine to other programs.
_MACHINE_MB_MAX = 1024
_CGROUPS = Path("/sys/fs/cgroup")
_V1_FILE = "memory/memory.limit_in_bytes"


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
    if settings.bucket and settings.pack_wait_ms:
        total_bytes -= SENDING_BYTES_MAX  # Packs on their way are copies.
    # A body reserves memory after the read with which it exceeds what it may have unreserved.
    unreserved_bytes = tasks_count * (defaults.unreserved_body_bytes + RECEIVE_BYTES)
    rest_bytes = max(total_bytes - unreserved_bytes, 0)
    # A caller has half of the memory of large bodies, which must suffice for the largest.
    large_bytes = max(rest_bytes // 2, 2 * limits.BODY_BYTES_MAX)
    return PoolLimits(
        medium_bodies_bytes_max=max(rest_bytes - large_bytes, 0),
        large_bodies_bytes_max=large_bytes,
    )


def container_bytes(cgroups: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Returns the memory limit of the container or of the systemd unit, or None without one."""
    sizes = [_read_limit(cgroups / path) for path in (*_v2_files(own), _V1_FILE)]
    # v1 says a number that is larger than any machine if there is no limit.
    return min((size for size in sizes if size and size < machine_bytes()), default=None)


def _v2_files(own: Path) -> list[str]:
    """Returns the files of the own cgroup and of those above it: each of them limits the process.
    In a container the own cgroup is the root."""
    lines = (_read(own) or "").splitlines()
    path = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    parts = [part for part in path.split("/") if part not in {"", ".."}]
    return ["/".join([*parts[:count], "memory.max"]) for count in range(len(parts) + 1)]


def _read_limit(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else None  # v2 says `max` if there is no limit.


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
