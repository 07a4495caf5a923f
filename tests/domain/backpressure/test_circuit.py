"""The circuit breaker sends single probes after growing, bounded delays, and every state can
end."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from conveyor.domain.backpressure.circuit import Circuit, CircuitState, ProbePolicy

POLICY = ProbePolicy(first_s=1.0, delay_s_max=30.0, lost_after_s=200.0)
steps = st.lists(
    st.tuples(
        st.sampled_from(["trip", "start", "pass", "fail", "abandon"]),
        st.floats(0.0, 300.0),
        st.integers(0, 3),
    ),
    max_size=40,
)


def _step(circuit: Circuit, verb: str, probe: int, now: float, random: Random) -> Circuit:
    match verb:
        case "trip":
            return circuit.trip(now=now, random=random)
        case "start":
            return circuit.start_probe(now=now) or circuit
        case "pass":
            return circuit.pass_probe(probe)
        case "fail":
            return circuit.fail_probe(probe, now=now, random=random)
        case _:
            return circuit.abandon_probe(probe, now=now, random=random)


@given(steps, st.integers())
def test_the_next_call_is_never_further_away_than_the_longest_delay(
    walk: list[tuple[str, float, int]], seed: int
) -> None:
    circuit, now, random = Circuit(policy=POLICY), 0.0, Random(seed)
    for verb, passed_s, age in walk:
        now += passed_s
        circuit = _step(circuit, verb, circuit.probe - age, now, random)

        wait_s = circuit.wait_s(now)
        # The tolerance covers the rounding of sums of floats.
        assert 0.0 <= wait_s <= max(POLICY.delay_s_max, POLICY.lost_after_s) + 1e-6
        later = circuit.start_probe(now=now + wait_s + 1e-6)
        assert circuit.is_closed or later is not None


@given(steps, st.integers())
def test_only_one_probe_runs_at_a_time(walk: list[tuple[str, float, int]], seed: int) -> None:
    circuit, now, random = Circuit(policy=POLICY), 0.0, Random(seed)
    for verb, passed_s, age in walk:
        now += passed_s
        circuit = _step(circuit, verb, circuit.probe - age, now, random)

        started = circuit.start_probe(now=now)
        if started is not None:
            assert started.state is CircuitState.HALF_OPEN
            assert started.probe == circuit.probe + 1
            assert started.start_probe(now=now + POLICY.lost_after_s / 2) is None


@given(steps, st.integers())
def test_only_the_current_probe_changes_an_open_circuit(
    walk: list[tuple[str, float, int]], seed: int
) -> None:
    circuit, now, random = Circuit(policy=POLICY), 0.0, Random(seed)
    for verb, passed_s, age in walk:
        now += passed_s
        before = circuit
        circuit = _step(circuit, verb, circuit.probe - age, now, random)

        is_stale = age > 0 or before.state is not CircuitState.HALF_OPEN
        if verb in {"pass", "fail", "abandon"} and is_stale:
            assert circuit == before
        if verb == "trip" and not before.is_closed:
            assert circuit == before


@given(st.integers(0, 200), st.integers())
def test_the_delay_doubles_with_each_failed_probe_up_to_its_bound(failures: int, seed: int) -> None:
    random = Random(seed)
    circuit = Circuit(policy=POLICY).trip(now=0.0, random=random)
    now = 0.0
    for number in range(failures):
        now += circuit.wait_s(now)
        started = circuit.start_probe(now=now)
        assert started is not None
        circuit = started.fail_probe(started.probe, now=now, random=random)

        ceiling = min(2.0 ** (number + 1) * POLICY.first_s, POLICY.delay_s_max)
        assert 0.49 * ceiling <= circuit.wait_s(now) <= 1.01 * ceiling


def test_a_passed_probe_closes_the_circuit_and_resets_the_delay() -> None:
    random = Random(1)
    circuit = Circuit(policy=POLICY).trip(now=0.0, random=random)
    for now in (10.0, 50.0, 100.0):
        started = circuit.start_probe(now=now)
        assert started is not None
        circuit = started.fail_probe(started.probe, now=now, random=random)
    started = circuit.start_probe(now=200.0)
    assert started is not None

    closed = started.pass_probe(started.probe)

    assert closed.is_closed
    assert closed.opened_at is None
    assert closed.wait_s(200.0) == 0.0
    assert closed.trip(now=300.0, random=random).wait_s(300.0) <= POLICY.first_s


def test_an_abandoned_probe_does_not_lengthen_the_delay() -> None:
    random = Random(1)
    circuit = Circuit(policy=POLICY).trip(now=0.0, random=random)
    for now in range(10, 1000, 10):
        started = circuit.start_probe(now=float(now))
        assert started is not None
        circuit = started.abandon_probe(started.probe, now=float(now), random=random)

    assert circuit.wait_s(990.0) <= POLICY.first_s


def test_a_probe_without_a_report_is_replaced_and_its_late_report_ignored() -> None:
    random = Random(1)
    started = Circuit(policy=POLICY).trip(now=0.0, random=random).start_probe(now=1.0)
    assert started is not None

    second = started.start_probe(now=1.0 + POLICY.lost_after_s)

    assert second is not None
    assert second.pass_probe(started.probe) == second
    assert second.pass_probe(second.probe).is_closed
