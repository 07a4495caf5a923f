"""Shards are chosen evenly by the id alone, and their count is fixed when a job is created."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.domain.ids import (
    FIRST_BATCH,
    TaskId,
    pin_shard_count,
    shard_of,
    shards_of,
    task_id,
    task_ids,
)
from tests.builders import RUN

ids = st.text(st.characters(max_codepoint=127), min_size=1, max_size=40).map(TaskId)


@given(ids, st.integers(1, 64))
def test_a_shard_is_within_the_layout(task: TaskId, count: int) -> None:
    assert 0 <= shard_of(task, count) < count


@given(ids)
def test_every_id_is_in_the_only_shard(task: TaskId) -> None:
    assert shard_of(task, 1) == 0


@pytest.mark.parametrize(
    ("text", "value"), [("", 0x811C9DC5), ("a", 0xE40C292C), ("foobar", 0xBF9CF968)]
)
def test_the_hash_is_fnv_1a_of_32_bits(text: str, value: int) -> None:
    assert shard_of(TaskId(text), 2**31) == value % 2**31


@given(st.lists(st.text("0123456789abcdef", min_size=32, max_size=32), max_size=20))
def test_a_group_of_ids_gets_the_shards_that_each_id_gets_alone(texts: list[str]) -> None:
    tasks = [TaskId(text) for text in texts]

    for count in (1, 2, 7, 8, 64):
        assert shards_of(tasks, count) == [shard_of(task, count) for task in tasks]


def test_ids_of_different_lengths_are_an_assertion_error() -> None:
    with pytest.raises(AssertionError):
        shards_of([TaskId("ab"), TaskId("abc")], 8)


def test_ids_made_in_a_group_equal_those_made_one_by_one() -> None:
    together = task_ids(RUN, FIRST_BATCH, range(5, 25))

    assert together == [task_id(RUN, FIRST_BATCH, index) for index in range(5, 25)]


@pytest.mark.parametrize("count", [2, 8, 64])
def test_tasks_are_spread_evenly(count: int) -> None:
    tasks = [task_id(RUN, FIRST_BATCH, index) for index in range(count * 200)]

    sizes = Counter(shard_of(task, count) for task in tasks)

    assert set(sizes) == set(range(count))
    assert max(sizes.values()) < 1.5 * 200
    assert min(sizes.values()) > 0.6 * 200


@pytest.mark.parametrize(
    ("tasks_count", "is_open", "pinned"),
    [(0, True, 8), (5, True, 8), (9_999, False, 1), (10_000, False, 8)],
)
def test_a_small_closed_job_has_one_shard(tasks_count: int, is_open: bool, pinned: int) -> None:
    count = pin_shard_count(tasks_count=tasks_count, is_open=is_open, configured=8, sync_max=10_000)

    assert count == pinned


@pytest.mark.parametrize("configured", [0, 65])
def test_an_impossible_layout_is_an_assertion_error(configured: int) -> None:
    with pytest.raises(AssertionError):
        pin_shard_count(tasks_count=0, is_open=True, configured=configured, sync_max=10_000)
