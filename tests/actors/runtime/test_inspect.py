"""Inspection of a running tree: as a value, as JSON and as text."""

from __future__ import annotations

import json

import trio
from trio.testing import MockClock

from actors.runtime import (
    Child,
    DynamicSupervisor,
    Inbox,
    Intensity,
    Mailbox,
    Strategy,
    Supervisor,
    nest,
    render,
    tree,
)
from tests.actors.runtime.toys import Lingerer, Puppet

SLOW = Intensity(restarts_max=3, within_s=100.0, backoff_s=5.0)


async def keep_unread(inbox: Inbox[str]) -> None:
    await trio.sleep_forever()


async def a_running_tree(nursery: trio.Nursery) -> Supervisor:
    mailbox = Mailbox[str](capacity=64)
    mailbox.address.tell_nowait("unread")
    fragile = Puppet("fragile", [])
    runs = DynamicSupervisor("runs", stop_grace_s=30.0)
    conveyor = Supervisor(
        "conveyor",
        strategy=Strategy.ONE_FOR_ONE,
        children=[
            Child("hoarder", run=keep_unread, mailbox=mailbox),
            nest(runs),
            fragile.child(intensity=SLOW),
        ],
    )
    await nursery.start(conveyor.run)
    await runs.start_child(Puppet("run-1", []).child())
    await runs.start_child(Puppet("run-2", []).child())
    await trio.sleep(2.0)
    await fragile.crash()
    return conveyor


async def test_the_text_shows_the_whole_tree(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    conveyor = await a_running_tree(nursery)

    text = render(tree(conveyor))

    assert text.splitlines() == [
        "conveyor  running  (supervisor)  up 2.0 s",
        "├─ hoarder  running  up 2.0 s  mail 1/64",
        "├─ runs  running  (dynamic)  up 2.0 s",
        "│  ├─ run-1  running  up 2.0 s",
        "│  └─ run-2  running  up 2.0 s",
        "└─ fragile  backing_off  last error Boom: fragile",
    ]


async def test_uptime_starts_over_and_the_restart_count_grows_with_each_restart(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    conveyor = await a_running_tree(nursery)

    await trio.sleep(6.0)

    assert render(tree(conveyor)).splitlines()[-1] == (
        "└─ fragile  running  up 1.0 s  restarts 1  last error Boom: fragile"
    )


async def test_a_node_survives_json_encoding(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    node = tree(await a_running_tree(nursery))

    decoded = json.loads(json.dumps(node.to_dict()))

    assert decoded["children"][0] == {
        "name": "hoarder",
        "kind": "actor",
        "state": "running",
        "restarts": 0,
        "mailbox_depth": 1,
        "mailbox_capacity": 64,
        "uptime_s": 2.0,
        "last_error": None,
        "children": [],
    }


async def test_a_tree_that_never_ran_can_be_inspected() -> None:
    idle = Supervisor("idle", strategy=Strategy.ONE_FOR_ONE, children=[])

    assert render(tree(idle)) == "idle  waiting  (supervisor)"


async def test_a_tree_can_be_inspected_while_it_stops(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    last = Lingerer("last", [], lingers_s=4.0)
    supervisor = Supervisor(
        "toys",
        strategy=Strategy.ONE_FOR_ONE,
        children=[Puppet("first", []).child(), last.child(stop_grace_s=2.0)],
    )

    async def run_for_one_second() -> None:
        with trio.move_on_after(1.0):
            await supervisor.run()

    nursery.start_soon(run_for_one_second)
    await trio.sleep(2.0)
    during = render(tree(supervisor))
    await trio.sleep(4.0)
    after = render(tree(supervisor))

    assert during.splitlines() == [
        "toys  stopping  (supervisor)  up 2.0 s",
        "├─ first  running  up 2.0 s",
        "└─ last  stopping  up 2.0 s",
    ]
    assert after.splitlines() == [
        "toys  stopped  (supervisor)",
        "├─ first  stopped",
        "└─ last  stopped",
    ]
