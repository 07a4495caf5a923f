"""The system engine: the real clock, a clock for virtual time, and the vault (SPEC 8.3)."""

from __future__ import annotations

from conveyor.engines.system.clock import SystemClock, VirtualClock
from conveyor.engines.system.vault import AesVault, load_or_create_secret

__all__ = ["AesVault", "SystemClock", "VirtualClock", "load_or_create_secret"]
