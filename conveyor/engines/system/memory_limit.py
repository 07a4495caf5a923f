"""The memory that this process may use: the limit of its container, and the machine's memory."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_V1_FILE = "memory/memory.limit_in_bytes"


def container_bytes(cgroups: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Returns the memory limit of the container or of the systemd unit, or None without one."""
    limits = [_read_limit(cgroups / path) for path in (*_v2_files(own), _V1_FILE)]
    # v1 says a number that is larger than any machine if there is no limit.
    return min((limit for limit in limits if limit and limit < machine_bytes()), default=None)


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
