"""Answers to other calls decide whether the gateway is unavailable or a target is at fault."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.domain.backpressure.gateway_health import (
    DOUBT_S_AGAIN,
    DOUBT_S_FEW,
    DOUBT_S_HOST,
    FAILURES_TO_OPEN,
    FEW_TARGETS,
    RETRY_S_MAX,
    TARGETS_KEPT_MAX,
    UNREACHABLE_TO_OPEN,
    GatewayHealth,
)

RANDOM = Random(1)


def _fail(
    health: GatewayHealth, target: str, now: float, host: str = "h", probe: int | None = None
) -> tuple[GatewayHealth, bool]:
    return health.note_failure(target, host, began_at=now, now=now, probe=probe, random=RANDOM)


def test_failures_of_several_targets_without_an_answer_open_the_circuit_and_blame_no_target() -> (
    None
):
    health = GatewayHealth().note_answer(began_at=0.0)
    for number in range(FAILURES_TO_OPEN):
        assert health.circuit.is_closed
        health, is_at_fault = _fail(health, f"t{number}", 2.0)
        assert not is_at_fault

    assert not health.circuit.is_closed


def test_a_target_is_at_fault_from_its_second_failure_while_others_are_answered() -> None:
    health, verdicts = GatewayHealth(), []
    for second in range(5):
        health = health.note_answer(began_at=second - 0.5)
        health, is_at_fault = _fail(health, "poison", second + 0.1)
        verdicts.append(is_at_fault)

    assert verdicts == [False, True, True, True, True]
    assert health.circuit.is_closed


def test_targets_that_fail_together_are_at_fault_if_calls_around_theirs_were_answered() -> None:
    health = GatewayHealth()
    for number in range(5):
        health, _ = _fail(health, f"t{number}", 1.0)
    before = health.note_answer(began_at=0.9)
    around = before.note_answer(began_at=1.1)

    assert [_fail(before, f"t{number}", 2.0)[1] for number in range(5)] == [False] * 5
    assert [_fail(around, f"t{number}", 2.0)[1] for number in range(5)] == [True] * 5


def test_targets_that_failed_in_one_outage_are_not_blamed_in_the_next() -> None:
    health = GatewayHealth()
    for down_at in (10.0, 30.0):
        health = health.note_answer(began_at=down_at - 2)
        for number in range(1, 8):
            health, is_at_fault = _fail(health, f"t{number % 7}", down_at + number / 10)
            # Until a second target fails, the first one cannot be told from a target at fault.
            assert not is_at_fault or number == 1


def test_each_failure_needs_its_own_proof_that_the_gateway_worked() -> None:
    health = GatewayHealth()
    for second in (1.0, 2.0):
        health = health.note_answer(began_at=second - 0.1)
        health, _ = _fail(health, "poison", second)
    health = health.note_answer(began_at=2.1)

    verdicts = []
    for down_at in (100.0, 101.0, 103.0):
        health, is_at_fault = _fail(health, "poison", down_at)
        verdicts.append(is_at_fault)

    # The first verdict counts the failure of second 2. For the later ones nothing proves that the
    # gateway worked.
    assert verdicts == [True, False, False]


def test_an_answer_clears_the_earlier_failures_of_its_target() -> None:
    health, _ = _fail(GatewayHealth().note_answer(began_at=0.9), "t", 1.0)
    health = health.note_answer(began_at=1.1, target="t")

    assert not _fail(health, "t", 100.0)[1]


def test_an_answer_closes_the_circuit() -> None:
    health = GatewayHealth()
    for number in range(FAILURES_TO_OPEN):
        health, _ = _fail(health, f"t{number}", 1.0)

    assert health.note_answer(began_at=0.5).circuit.is_closed


def test_a_single_failing_target_opens_no_circuit_and_is_at_fault_after_a_delay() -> None:
    health, now = GatewayHealth(), 0.0
    is_at_fault = False
    while not is_at_fault:
        health, is_at_fault = _fail(health, "poison", now)
        assert health.circuit.is_closed
        now += health.retry_after_s("poison", now=now)

    assert DOUBT_S_FEW <= now <= DOUBT_S_FEW + 2 * RETRY_S_MAX
    assert _fail(health, "poison", now)[1]


def _prove(health: GatewayHealth, target: str, now: float) -> GatewayHealth:
    """The target fails twice while other calls are answered, so it is at fault."""
    health, _ = _fail(health.note_answer(began_at=now - 0.1), target, now)
    health, is_at_fault = _fail(health.note_answer(began_at=now + 0.9), target, now + 1.0)
    assert is_at_fault
    return health.note_answer(began_at=now + 1.1)


def test_targets_that_were_at_fault_before_are_blamed_again_after_a_shorter_delay() -> None:
    health = _prove(_prove(GatewayHealth(), "a", 1.0), "b", 1.0)
    # The first iteration counts the failure of second 2, which is proven now.
    for second in (4.0, 5.0):
        for target in ("a", "b"):
            health, _ = _fail(health, target, second)

    assert not _fail(health, "a", 5.0 + DOUBT_S_AGAIN / 2)[1]
    assert _fail(health, "a", 5.1 + DOUBT_S_AGAIN)[1]


@pytest.mark.parametrize("proven", [(), ("p",)])
@pytest.mark.parametrize("targets", [("a",), ("a", "b")])
def test_an_outage_that_begins_after_an_answer_fails_no_page_of_a_small_job(
    targets: tuple[str, ...], proven: tuple[str, ...]
) -> None:
    """No other call proves the outage for five minutes (seed 540)."""
    health = GatewayHealth().note_answer(began_at=0.0)
    for target in proven:
        health = _prove(health, target, 1.0)
        health, _ = _fail(health, target, 4.0)  # This counts the failure of second 2.

    for second in range(5, 300):
        for target in (*targets, *proven):
            health, is_at_fault = _fail(health, target, float(second))
            assert not is_at_fault


def test_many_failing_targets_of_one_host_are_at_fault_after_an_hour() -> None:
    health = GatewayHealth()
    for number in range(2 * FEW_TARGETS):
        health, _ = _fail(health, f"t{number}", 0.0)

    assert not _fail(health, "t1", DOUBT_S_HOST / 2)[1]
    judged, is_at_fault = _fail(health, "t1", DOUBT_S_HOST + 1)
    assert is_at_fault
    assert judged.circuit.is_closed


def test_failing_targets_of_several_hosts_are_not_blamed_during_a_long_outage() -> None:
    health = GatewayHealth()
    for number in range(2 * FEW_TARGETS):
        health, _ = _fail(health, f"t{number}", 0.0, host=f"h{number}")

    assert not _fail(health, "t1", 100 * DOUBT_S_HOST)[1]


def test_calls_that_cannot_be_sent_open_the_circuit_and_a_passed_probe_closes_it() -> None:
    health = GatewayHealth()
    for _ in range(UNREACHABLE_TO_OPEN):
        assert health.circuit.is_closed
        health = health.note_unreachable(now=1.0, probe=None, random=RANDOM)

    assert not health.circuit.is_closed
    assert health.note_answer(began_at=5.0).circuit.is_closed


@given(
    st.lists(
        st.tuples(st.sampled_from(["ok", "fail", "gone"]), st.integers(0, 5), st.floats(0, 90)),
        max_size=60,
    )
)
def test_no_sequence_of_outcomes_delays_the_next_call_beyond_the_longest_delay(
    walk: list[tuple[str, int, float]],
) -> None:
    health, now = GatewayHealth(), 0.0
    for what, number, passed_s in walk:
        now += passed_s
        started = health.circuit.start_probe(now=now)
        probe = None if started is None else started.probe
        if what == "ok":
            health = health.note_answer(began_at=now - 1)
        elif what == "gone":
            health = health.note_unreachable(now=now, probe=probe, random=RANDOM)
        else:
            health, _ = _fail(health, f"t{number}", now, probe=probe)

        assert health.circuit.wait_s(now) <= RETRY_S_MAX
        assert 0.0 < health.retry_after_s("t0", now=now) <= RETRY_S_MAX


def test_the_number_of_remembered_targets_is_bounded() -> None:
    health = GatewayHealth()
    for number in range(3 * TARGETS_KEPT_MAX):
        health, _ = _fail(health, f"t{number}", float(number))

    assert len(health.doubts) <= TARGETS_KEPT_MAX
