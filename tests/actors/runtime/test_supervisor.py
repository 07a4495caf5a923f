"""The supervisor: restart policies, readiness, back-off, escalation, and exceptions that are not
crashes."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.runtime import (
    Child,
    Inbox,
    Intensity,
    Mailbox,
    Policy,
    RestartsExhausted,
    Strategy,
    Supervisor,
    nest,
)
from tests.actors.runtime.toys import PROMPT, Boom, Puppet, puppets, states


def one_for_one(*children: Child) -> Supervisor:
    return Supervisor("toys", strategy=Strategy.ONE_FOR_ONE, children=children)


def crash_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    ("policy", "after_return", "after_crash"),
    [
        (Policy.PERMANENT, "running", "running"),
        (Policy.TRANSIENT, "finished", "running"),
        (Policy.TEMPORARY, "finished", "finished"),
    ],
)
async def test_the_policy_decides_which_children_restart(
    nursery: trio.Nursery, policy: Policy, after_return: str, after_crash: str
) -> None:
    cast = puppets("abc", [])
    supervisor = one_for_one(
        cast["a"].child(policy), cast["b"].child(policy), cast["c"].child(Policy.PERMANENT)
    )
    await nursery.start(supervisor.run)

    await cast["a"].finish()
    await cast["b"].crash()

    assert states(supervisor) == {"a": after_return, "b": after_crash, "c": "running"}


async def test_a_supervisor_returns_when_every_child_has_ended_permanently(
    nursery: trio.Nursery,
) -> None:
    cast = puppets("ab", [])
    supervisor = one_for_one(*(puppet.child(Policy.TRANSIENT) for puppet in cast.values()))
    returned = trio.Event()

    async def run_and_record() -> None:
        await supervisor.run()
        returned.set()

    nursery.start_soon(run_and_record)
    await wait_all_tasks_blocked()
    await cast["a"].finish()
    assert not returned.is_set()
    await cast["b"].finish()

    assert returned.is_set()


async def test_an_earlier_crash_does_not_count_against_a_later_return(
    nursery: trio.Nursery,
) -> None:
    cast = puppets("ab", [])
    supervisor = one_for_one(cast["a"].child(Policy.TRANSIENT), cast["b"].child())
    await nursery.start(supervisor.run)

    await cast["a"].crash()
    await cast["a"].finish()

    assert states(supervisor) == {"a": "finished", "b": "running"}


async def test_two_children_of_one_name_are_refused() -> None:
    child = Puppet("a", []).child()

    with pytest.raises(AssertionError, match="two children of one name"):
        one_for_one(child, child)


def test_a_child_without_a_name_is_refused() -> None:
    with pytest.raises(AssertionError):
        Child("", run=trio.sleep_forever)


def test_an_endless_grace_is_refused() -> None:
    with pytest.raises(AssertionError):
        Child("a", run=trio.sleep_forever, stop_grace_s=float("inf"))


async def test_a_supervisor_cannot_run_twice_at_once(nursery: trio.Nursery) -> None:
    supervisor = one_for_one(Puppet("a", []).child())
    await nursery.start(supervisor.run)

    with pytest.raises(AssertionError, match="running already"):
        await supervisor.run()


async def test_the_next_child_starts_once_the_previous_one_reports_ready(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    journal: list[str] = []

    async def slow(*, task_status: trio.TaskStatus[str]) -> None:
        journal.append("slow begins")
        await trio.sleep(3.0)
        journal.append("slow is ready")
        task_status.started("an address")
        await trio.sleep_forever()

    after = Puppet("after", journal)
    supervisor = one_for_one(Child("slow", run=slow, reports_ready=True), after.child())
    nursery.start_soon(supervisor.run)
    await wait_all_tasks_blocked()
    assert states(supervisor) == {"slow": "starting", "after": "waiting"}

    await trio.sleep(3.1)

    assert journal == ["slow begins", "slow is ready", "+after"]
    assert set(states(supervisor).values()) == {"running"}


async def test_a_child_that_crashes_before_it_is_ready_is_restarted(
    nursery: trio.Nursery,
) -> None:
    journal: list[str] = []

    async def second_time_lucky(*, task_status: trio.TaskStatus[None]) -> None:
        journal.append("try")
        if len(journal) == 1:
            raise Boom("too early")
        task_status.started()
        await trio.sleep_forever()

    fickle = Child("fickle", run=second_time_lucky, reports_ready=True, intensity=PROMPT)
    supervisor = one_for_one(fickle, Puppet("after", journal).child())

    await nursery.start(supervisor.run)

    assert journal == ["try", "try", "+after"]


async def test_a_crash_is_handled_while_a_later_child_is_still_starting(
    nursery: trio.Nursery,
) -> None:
    journal: list[str] = []

    async def never_ready(*, task_status: trio.TaskStatus[None]) -> None:
        await trio.sleep_forever()

    first = Puppet("first", journal)
    supervisor = one_for_one(first.child(), Child("shy", run=never_ready, reports_ready=True))
    nursery.start_soon(supervisor.run)
    await wait_all_tasks_blocked()

    await first.crash()

    assert journal == ["+first", "-first", "+first"]
    assert states(supervisor) == {"first": "running", "shy": "starting"}


async def test_the_back_off_grows_with_each_restart(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    starts_at: list[float] = []

    async def crash_at_once() -> None:
        starts_at.append(trio.current_time())
        raise Boom

    intensity = Intensity(restarts_max=4, within_s=60.0, backoff_s=1.0, backoff_s_max=3.0)
    supervisor = one_for_one(Child("a", run=crash_at_once, intensity=intensity))

    with pytest.raises(RestartsExhausted):
        await supervisor.run()

    pauses = [later - earlier for earlier, later in pairwise(starts_at)]
    assert pauses == pytest.approx([1.0, 2.0, 3.0, 3.0])


@pytest.mark.parametrize("backoff_s", [0.0, 0.1])
@pytest.mark.parametrize("restarts_max", [0, 1, 5])
async def test_a_child_that_always_crashes_is_given_up_after_its_restarts(
    autojump_clock: MockClock, restarts_max: int, backoff_s: float
) -> None:
    """A supervisor that never gave up would restart the child without end. The child sleeps in the
    end, so that the deadline fails such a test."""
    starts_count = 0

    async def crash_at_once() -> None:
        nonlocal starts_count
        starts_count += 1
        if starts_count > 2 * restarts_max + 10:
            await trio.sleep_forever()
        raise Boom

    intensity = Intensity(restarts_max=restarts_max, backoff_s=backoff_s)
    supervisor = one_for_one(Child("a", run=crash_at_once, intensity=intensity))

    with trio.fail_after(intensity.within_s), pytest.raises(RestartsExhausted):
        await supervisor.run()

    assert starts_count == restarts_max + 1


async def test_crashes_far_apart_never_exhaust_the_restarts(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    puppet = Puppet("a", [])
    supervisor = one_for_one(puppet.child())
    await nursery.start(supervisor.run)

    for _ in range(10):
        await puppet.crash()
        await trio.sleep(30.0)

    assert states(supervisor) == {"a": "running"}


async def test_giving_up_stops_the_other_children_last_first_and_raises_from_the_crash(
    nursery: trio.Nursery,
) -> None:
    journal: list[str] = []
    cast = puppets("abcd", journal)
    crash = Boom("the last straw")
    never = Intensity(restarts_max=0)
    children = [p.child(intensity=never) for p in cast.values()]
    supervisor = Supervisor("toys", strategy=Strategy.REST_FOR_ONE, children=children)

    async def crash_in_the_middle() -> None:
        await wait_all_tasks_blocked()
        await cast["b"].crash(crash)

    nursery.start_soon(crash_in_the_middle)
    with pytest.raises(RestartsExhausted) as raised:
        await supervisor.run()

    assert raised.value.__cause__ is crash
    assert (raised.value.supervisor, raised.value.child) == ("toys", "b")
    assert journal[4:] == ["-b", "-d", "-c", "-a"]
    assert states(supervisor)["b"] == "failed"


async def test_a_permanent_child_that_keeps_returning_is_given_up_too() -> None:
    supervisor = one_for_one(Child("a", run=trio.lowlevel.checkpoint, intensity=PROMPT))

    with pytest.raises(RestartsExhausted) as raised:
        await supervisor.run()

    assert raised.value.__cause__ is None


async def test_a_crash_within_the_childs_own_nursery_is_unwrapped() -> None:
    crash = Boom("deep inside")

    async def crash_in_nursery() -> None:
        async with trio.open_nursery() as outer, trio.open_nursery() as inner:
            inner.start_soon(trio.sleep_forever)
            outer.start_soon(trio.sleep_forever)
            raise crash

    supervisor = one_for_one(Child("a", run=crash_in_nursery, intensity=Intensity(restarts_max=0)))

    with pytest.raises(RestartsExhausted) as raised:
        await supervisor.run()

    assert raised.value.__cause__ is crash


async def test_exhaustion_escalates_from_supervisor_to_supervisor(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runs: list[str] = []

    async def crash_at_once() -> None:
        runs.append("run")
        raise Boom

    once = Intensity(restarts_max=1, backoff_s=0.0)
    inner = one_for_one(Child("a", run=crash_at_once, intensity=once))
    outer = Supervisor(
        "outer", strategy=Strategy.ONE_FOR_ONE, children=[nest(inner, intensity=once)]
    )

    with pytest.raises(RestartsExhausted) as raised:
        await outer.run()

    assert len(runs) == 4
    assert isinstance(raised.value.__cause__, RestartsExhausted)
    assert isinstance(raised.value.__cause__.__cause__, Boom)
    assert len(crash_records(caplog)) == 4  # One traceback per crash, none for the escalation.


async def test_a_crash_is_logged_once_with_its_traceback(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    puppet = Puppet("a", [])
    crash = Boom("look at me")
    await nursery.start(one_for_one(puppet.child()).run)

    await puppet.crash(crash)

    (record,) = crash_records(caplog)
    assert record.exc_info is not None
    assert record.exc_info[1] is crash
    assert record.getMessage() == "child a crashed: Boom('look at me')"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
async def test_an_exception_that_is_no_crash_is_raised_after_an_orderly_stop(
    nursery: trio.Nursery, kind: type[BaseException]
) -> None:
    journal: list[str] = []
    cast = puppets("abc", journal)
    supervisor = one_for_one(*(puppet.child() for puppet in cast.values()))

    async def interrupt() -> None:
        await wait_all_tasks_blocked()
        await cast["b"].crash(kind())

    nursery.start_soon(interrupt)
    with pytest.raises(kind):
        await supervisor.run()

    assert " ".join(journal) == "+a +b +c -b -c -a"


async def test_unread_messages_survive_a_restart_and_the_message_in_progress_is_lost(
    nursery: trio.Nursery,
) -> None:
    seen: list[str] = []

    async def read(inbox: Inbox[str]) -> None:
        async with inbox:
            async for message in inbox:
                if message == "poison":
                    raise Boom
                seen.append(message)

    mailbox = Mailbox[str](capacity=8)
    for message in ("one", "poison", "two", "three"):
        mailbox.address.tell_nowait(message)

    reader = Child("reader", run=read, mailbox=mailbox, intensity=PROMPT)
    await nursery.start(one_for_one(reader).run)
    await wait_all_tasks_blocked()
    await mailbox.address.tell("four")
    await wait_all_tasks_blocked()

    assert seen == ["one", "two", "three", "four"]


async def test_messages_sent_during_a_back_off_are_read_after_the_restart(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    seen: list[str] = []

    async def read(inbox: Inbox[str]) -> None:
        message = await inbox.receive()
        seen.append(message)
        raise Boom

    mailbox = Mailbox[str](capacity=1)
    slow = Intensity(restarts_max=3, within_s=100.0, backoff_s=5.0)
    reader = Child("reader", run=read, mailbox=mailbox, intensity=slow)
    await nursery.start(one_for_one(reader).run)

    await mailbox.address.tell("first")
    await wait_all_tasks_blocked()
    await mailbox.address.tell("second")
    await trio.sleep(6.0)

    assert seen == ["first", "second"]


async def test_a_nested_supervisor_is_ready_when_its_children_are(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    journal: list[str] = []

    async def slow(*, task_status: trio.TaskStatus[None]) -> None:
        await trio.sleep(3.0)
        journal.append("slow is ready")
        task_status.started()
        await trio.sleep_forever()

    inner = one_for_one(Child("slow", run=slow, reports_ready=True))
    after = Puppet("after", journal)
    outer = Supervisor(
        "outer", strategy=Strategy.REST_FOR_ONE, children=[nest(inner), after.child()]
    )

    await nursery.start(outer.run)

    assert journal == ["slow is ready", "+after"]


def test_a_nested_supervisor_gets_more_grace_than_its_children_together() -> None:
    inner = one_for_one(
        Child("a", run=trio.sleep_forever, stop_grace_s=3.0),
        Child("b", run=trio.sleep_forever, stop_grace_s=4.0),
    )

    assert nest(inner).stop_grace_s > 7.0
