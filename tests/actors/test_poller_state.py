"""PollerState: waits of the poll loop."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from actors.poller.state import PollerState
from conveyor.domain.run.wait_reason import WaitReason
from tests.builders import a_run


async def test_a_deferral_that_ends_during_a_slow_release_is_over(
    autojump_clock: MockClock,
) -> None:
    state = PollerState(a_run())
    state.defer(WaitReason.RESOURCES, "no descriptors", 2.0)
    await state.wait_changed(0.0)
    await trio.sleep(5.0)
    waited_since = trio.current_time()

    await state.wait_changed(state.deferred_until - trio.current_time())

    assert trio.current_time() == waited_since
