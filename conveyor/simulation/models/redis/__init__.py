"""A model of Redis: it runs the engine's own Lua scripts over the few commands that they use."""

from __future__ import annotations

from conveyor.simulation.models.redis.model import RedisModel

__all__ = ["RedisModel"]
