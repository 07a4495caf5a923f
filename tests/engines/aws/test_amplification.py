"""The number of receives for each task of a job at its cap, on a real server, because a model may
lack some of its behaviour."""

from __future__ import annotations

import pytest

from bench.dispatch import Arm
from bench.multi_process import in_one_process

pytestmark = pytest.mark.slow


async def test_with_permits_each_message_is_received_once_over_the_wire(
    localstack: str, redis: str
) -> None:
    arm = Arm(name="permits", tasks=60, dispatchers=20, think_s=0.02)

    drained = await in_one_process(localstack, redis, arm, lambda done: None)

    assert (drained.done, drained.dead) == (60, 0)
    assert drained.amplification <= 1.05
