"""The system engine: real and virtual clocks, threads for computing, the vault
(SPEC.md 4.22, 5.3)."""

from __future__ import annotations

from conveyor.engines.system.aside import ThreadAside
from conveyor.engines.system.clock import SystemClock, VirtualClock
from conveyor.engines.system.vault import AesVault, load_or_create_secret

__all__ = ["AesVault", "SystemClock", "ThreadAside", "VirtualClock", "load_or_create_secret"]
