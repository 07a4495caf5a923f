"""Ids: ULIDs that sort by time, and ids that are derived from what they name."""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.domain import ids
from conveyor.domain.ids import FIRST_BATCH, BatchId
from tests.builders import OTHER_RUN, RUN, T0

instants = st.floats(0, 4_000_000_000, allow_nan=False)


@given(instants, st.integers())
def test_a_ulid_contains_the_time_it_was_minted_at(at: float, seed: int) -> None:
    assert ids.minted_at(ids.mint_ulid(at, Random(seed))) == int(at * 1000) / 1000


@given(instants, instants, st.integers())
def test_ulids_sort_by_the_millisecond_they_were_minted_in(
    one: float, other: float, seed: int
) -> None:
    random = Random(seed)

    first, second = ids.mint_ulid(one, random), ids.mint_ulid(other, random)

    if int(one * 1000) != int(other * 1000):
        assert (first < second) is (one < other)
    else:
        assert first[:10] == second[:10]


@given(instants, st.integers())
def test_a_minted_id_is_a_valid_ulid(instant: float, seed: int) -> None:
    ulid = ids.mint_ulid(instant, Random(seed))

    assert ids.is_ulid(ulid)
    assert re.match(ids.ULID_PATTERN, ulid)


def test_the_random_part_of_a_ulid_uses_all_its_bits() -> None:
    random = Random(1)

    minted = {ids.mint_ulid(T0, random) for _ in range(1000)}

    assert len(minted) == 1000
    assert all(len({ulid[place] for ulid in minted}) == 32 for place in range(10, 26))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0" * 25,
        "0" * 27,
        "8" + "0" * 25,
        "0" * 25 + "I",
        "0" * 25 + "L",
        "0" * 25 + "O",
        "0" * 25 + "U",
        "0" * 25 + "a",
        "0" * 26 + "\n",
        "\N{ARABIC-INDIC DIGIT ZERO}" * 26,
        "../" + "0" * 23,
    ],
)
def test_invalid_text_is_no_ulid(text: str) -> None:
    assert not ids.is_ulid(text)


@pytest.mark.parametrize("text", ["", "a" * 129, "a b", "a/b", "a#b", "a%00", "ä", "a\n"])
def test_invalid_text_is_no_task_id(text: str) -> None:
    assert not ids.is_task_id(text)


@given(st.integers(0, 10**6))
def test_a_task_id_is_a_function_of_run_batch_and_index(index: int) -> None:
    identity = ids.task_id(RUN, FIRST_BATCH, index)

    assert identity == ids.task_id(RUN, FIRST_BATCH, index)
    assert identity != ids.task_id(OTHER_RUN, FIRST_BATCH, index)
    assert identity != ids.task_id(RUN, BatchId("1"), index)
    assert identity != ids.task_id(RUN, FIRST_BATCH, index + 1)
    assert ids.is_task_id(identity)
    assert re.match(ids.TASK_ID_PATTERN, identity)


def test_a_caller_id_does_not_contain_the_key_and_depends_on_the_secret() -> None:
    caller = ids.caller_id("api-key", b"secret")

    assert "api-key" not in caller
    assert caller == ids.caller_id("api-key", b"secret")
    assert caller != ids.caller_id("api-key", b"other")
    assert caller != ids.caller_id("api-kez", b"secret")


def test_a_run_has_one_notice_per_event() -> None:
    notice = ids.notice_id(RUN, "run.completed")

    assert notice == ids.notice_id(RUN, "run.completed")
    assert notice != ids.notice_id(RUN, "run.stopped")
    assert notice != ids.notice_id(OTHER_RUN, "run.completed")
    assert "." not in notice
