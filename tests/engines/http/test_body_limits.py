"""The size limits for bodies fit into the memory of a worker."""

from __future__ import annotations

import pytest

from actors.limiters.fair_limiter import slots_count
from conveyor.bootstrap.body_memory import body_limits, body_memory_mb
from conveyor.config import Settings
from conveyor.domain import limits
from conveyor.http_client.stream import RECEIVE_BYTES

MB = 1024 * 1024


@pytest.mark.parametrize(
    ("mb", "concurrency"), [(64, 20), (128, 200), (1024, 200), (1024, 2000), (8192, 10_000)]
)
def test_the_bodies_of_all_tasks_fit_into_the_memory(mb: int, concurrency: int) -> None:
    divided = body_limits(Settings(body_memory_mb=mb, concurrency=concurrency))

    # These are the tasks that fetch, and as many that write at the same time.
    tasks_count = slots_count(concurrency) + concurrency
    total = divided.medium_bodies_bytes_max + divided.large_bodies_bytes_max
    assert total + tasks_count * (divided.unreserved_body_bytes + RECEIVE_BYTES) <= mb * MB


@pytest.mark.parametrize("mb", [limits.BODY_MEMORY_MB_MIN, 1024])
def test_the_largest_body_fits_into_the_memory_share_of_a_caller(mb: int) -> None:
    divided = body_limits(Settings(body_memory_mb=mb, concurrency=10_000))

    assert divided.large_bodies_bytes_max // 2 >= limits.BODY_BYTES_MAX


def test_without_a_setting_at_most_half_of_the_memory_is_for_bodies() -> None:
    assert body_memory_mb(Settings()) >= limits.BODY_MEMORY_MB_MIN
