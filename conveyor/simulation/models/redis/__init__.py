"""Redis, modelled: our own scripts run as they are, over the few commands that they use."""

from __future__ import annotations

from conveyor.simulation.models.redis.model import RedisModel

__all__ = ["RedisModel"]
