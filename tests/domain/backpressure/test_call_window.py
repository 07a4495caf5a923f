"""The call window stays within the concurrency limit that the gateway states."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.domain.backpressure.call_window import (
    CEILING_S,
    LIMIT_MAX,
    PAUSE_S_MAX,
    RETRY_AFTER_S_MAX,
    SIZE_FIRST,
    CallWindow,
)

numbers = st.one_of(st.none(), st.integers(0, 10**12))
waits = st.one_of(st.none(), st.floats(-1e9, 1e9))


def _answer(window: CallWindow, **fields: object) -> CallWindow:
    arguments = {
        "limit": None,
        "remaining": None,
        "inflight": window.capacity,
        "now": 0.0,
        **fields,
    }
    return window.note_answer(**arguments)  # type: ignore[arg-type]


def _refuse(window: CallWindow, now: float, inflight: int, **fields: object) -> CallWindow:
    arguments = {"limit": None, "began_at": now, "retry_after_s": None, **fields}
    return window.note_refusal(now=now, inflight=inflight, random=Random(1), **arguments)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.booleans(), numbers, numbers, waits, st.floats(0, 100))))
def test_the_window_stays_between_one_call_and_the_stated_limit_whatever_is_answered(
    walk: list[tuple[bool, int | None, int | None, float | None, float]],
) -> None:
    window, now, stated = CallWindow(), 0.0, None
    for is_refused, limit, remaining, retry_after_s, passed_s in walk:
        now += passed_s
        stated = limit if limit is not None else stated
        inflight = window.capacity
        if is_refused:
            window = _refuse(window, now, inflight, limit=limit, retry_after_s=retry_after_s)
        else:
            window = _answer(window, limit=limit, remaining=remaining, inflight=inflight, now=now)

        assert 1 <= window.capacity <= LIMIT_MAX
        assert stated is None or window.capacity <= max(1, stated)
        assert window.resume_at <= now + max(RETRY_AFTER_S_MAX, PAUSE_S_MAX)


def test_the_window_opens_to_the_remaining_calls_of_the_first_answer() -> None:
    window = _answer(CallWindow(), limit=20, remaining=13, inflight=2)

    assert window.capacity == 14


def test_without_a_stated_limit_the_window_doubles_with_each_round() -> None:
    window = CallWindow()
    for _ in range(int(SIZE_FIRST)):
        window = _answer(window)

    assert window.capacity == 2 * SIZE_FIRST


def test_a_window_that_is_not_used_does_not_grow() -> None:
    window = CallWindow()
    for _ in range(100):
        window = _answer(window, inflight=1)

    assert window.capacity <= 2 * 1 + 1


def test_the_window_does_not_grow_while_answers_state_no_remaining_calls() -> None:
    window = _answer(CallWindow(), limit=20, remaining=3, inflight=2)
    for _ in range(100):
        window = _answer(window, limit=20, remaining=0)

    assert window.capacity == 4


def test_a_refusal_that_states_the_limit_sets_it() -> None:
    window = CallWindow(size=50.0)

    window = _refuse(window, 10.0, 50, limit=20)

    assert window.capacity == 20
    assert window.room(0, now=10.0) == 0


def test_a_burst_of_refusals_shrinks_the_window_once() -> None:
    window = _refuse(CallWindow(size=40.0), 10.0, 40)
    shrunk = window.capacity
    for _ in range(20):
        window = _refuse(window, 10.1, 39, began_at=9.0)

    assert shrunk == window.capacity == 19


def test_a_refused_window_size_is_tried_again_after_a_minute() -> None:
    window = _refuse(CallWindow(size=10.0), 0.0, 10)
    for _ in range(1_000):
        window = _answer(window, now=CEILING_S / 2)
    assert window.capacity == 9

    window = _answer(window, now=CEILING_S + 1)
    for _ in range(1_000):
        window = _answer(window, now=CEILING_S + 2)

    assert window.capacity == 10


@pytest.mark.parametrize(
    ("retry_after_s", "pause_s"), [(7.0, 7.0), (31_536_000.0, RETRY_AFTER_S_MAX), (-5.0, 0.0)]
)
def test_a_retry_after_is_followed_up_to_a_maximum(retry_after_s: float, pause_s: float) -> None:
    window = _refuse(CallWindow(), 100.0, 2, retry_after_s=retry_after_s)

    assert window.resume_at == 100.0 + pause_s


def test_pauses_grow_while_every_call_is_refused() -> None:
    window, now, pauses = CallWindow(), 0.0, []
    for _ in range(12):
        window = _refuse(window, now, 1)
        pauses.append(window.resume_at - now)
        now = window.resume_at

    assert pauses[0] <= 1.0
    assert pauses[-1] >= PAUSE_S_MAX / 2
    assert max(pauses) <= PAUSE_S_MAX


def test_after_an_outage_the_window_starts_small_and_keeps_its_limit() -> None:
    window = _answer(CallWindow(), limit=20, remaining=18, inflight=2).restart()

    assert window.capacity == SIZE_FIRST
    assert _answer(window, limit=20, remaining=18, inflight=2).capacity == SIZE_FIRST + 1
    assert window.limit == 20
