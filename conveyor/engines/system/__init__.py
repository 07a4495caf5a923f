"""The system engine: real and virtual clocks, the secret box
(SPEC.md 4.22, 5.3)."""

from __future__ import annotations

from conveyor.engines.system.aes_secret_box import AesSecretBox, load_or_create_secret
from conveyor.engines.system.clock import SystemClock, VirtualClock

__all__ = ["AesSecretBox", "SystemClock", "VirtualClock", "load_or_create_secret"]
