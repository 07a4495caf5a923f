"""The system engine: real and virtual clocks, threads for computing, the secret box
(SPEC.md 4.22, 5.3)."""

from __future__ import annotations

from conveyor.engines.system.aes_secret_box import AesSecretBox, load_or_create_secret
from conveyor.engines.system.clock import SystemClock, VirtualClock
from conveyor.engines.system.thread_executor import ThreadExecutor

__all__ = ["AesSecretBox", "SystemClock", "ThreadExecutor", "VirtualClock", "load_or_create_secret"]
