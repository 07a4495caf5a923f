"""The clock of a service: it follows the dates of responses, whatever the clock of this machine is
set to."""

from __future__ import annotations

from email.utils import formatdate

import pytest

from conveyor.engines.aws.client.service_clock import OBSERVED_EVERY_S, ServiceClock, date_of
from tests.builders import T0, ManualClock

DAY_S = 86_400.0


def a_date(at: float) -> list[tuple[bytes, bytes]]:
    return [(b"date", formatdate(int(at), usegmt=True).encode())]


def observe(clock: ServiceClock, machine: ManualClock, at: float, *, took_s: float = 0.0) -> None:
    """Passes a response that was written at `at` and arrives now."""
    machine.advance(OBSERVED_EVERY_S)
    clock.observe(a_date(at), sent_at=machine.steady() - took_s)


def test_without_a_response_the_service_clock_is_that_of_the_machine() -> None:
    machine = ManualClock()
    clock = ServiceClock(machine)

    machine.step(DAY_S)
    clock.observe([(b"server", b"x")], sent_at=machine.steady())

    assert clock.now() == T0 + DAY_S


@pytest.mark.parametrize("step_s", [-40 * DAY_S, -DAY_S, DAY_S, 40 * DAY_S])
def test_setting_the_machine_clock_later_changes_nothing(step_s: float) -> None:
    machine = ManualClock()
    clock = ServiceClock(machine)
    observe(clock, machine, T0 + OBSERVED_EVERY_S)

    machine.step(step_s)
    machine.advance(10.0)

    assert clock.now() == pytest.approx(T0 + OBSERVED_EVERY_S + 10.0)


@pytest.mark.parametrize("step_s", [-DAY_S, DAY_S])
def test_a_machine_clock_that_was_wrong_from_the_start_is_corrected_by_the_first_response(
    step_s: float,
) -> None:
    machine = ManualClock()
    machine.step(step_s)
    clock = ServiceClock(machine)

    observe(clock, machine, T0 + OBSERVED_EVERY_S)

    assert abs(clock.now() - (T0 + OBSERVED_EVERY_S)) <= 1.0


def test_dates_without_fractions_do_not_move_a_correct_clock() -> None:
    machine = ManualClock()
    clock = ServiceClock(machine)

    for _ in range(5):
        machine.advance(0.3)
        observe(clock, machine, machine.now() + OBSERVED_EVERY_S, took_s=0.2)
        assert clock.now() == pytest.approx(machine.now())


def test_a_slow_response_moves_the_clock_only_as_far_as_its_date_proves() -> None:
    """The date may have been written when the request was sent, or when the response arrived."""
    machine = ManualClock()
    clock = ServiceClock(machine)
    observe(clock, machine, T0 + OBSERVED_EVERY_S)

    observe(clock, machine, machine.now() - 8.0, took_s=9.0)

    assert clock.now() == pytest.approx(machine.now())


@pytest.mark.parametrize("date", [b"", b"soon", b"Tue, 99 Nov 99999 25:61:61 GMT", b"\xff" * 99])
def test_an_unreadable_date_is_ignored(date: bytes) -> None:
    assert date_of([(b"date", date)]) is None
