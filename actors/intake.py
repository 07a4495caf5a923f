"""What a poller takes from its queue, and what it puts back for want of leases (SPEC.md 4.6)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

import trio

from actors.run_desk import Desk
from conveyor.domain import limits
from conveyor.domain.backpressure import idle_s
from conveyor.ports.errors import Unavailable
from conveyor.ports.queue import Message
from conveyor.telemetry import Metrics
from conveyor.usecases.env import Env


async def receive(env: Env, metrics: Metrics, desk: Desk, count_max: int) -> list[Message]:
    """Up to `count_max` messages; where parked ones keep the poller going, an empty queue is not
    looked at in every round."""
    now = trio.current_time()
    is_early = desk.doors is not None and now < desk.emptied_at + idle_s(desk.dry_looks)
    if count_max == 0 or is_early:
        return []
    messages = await env.queue.receive(
        desk.run.run_id, count_max=count_max, visibility_s=limits.VISIBILITY_S
    )
    metrics.receives.inc()
    metrics.messages_delivered.inc(len(messages))
    if messages:
        desk.dry_looks, desk.emptied_at = 0, -math.inf
    else:
        desk.dry_looks, desk.emptied_at = desk.dry_looks + 1, now
    return messages


async def refuse(env: Env, metrics: Metrics, desk: Desk, messages: Sequence[Message]) -> None:
    """Where permits come after the receive: what got none goes back."""
    desk.is_refused = bool(messages)
    metrics.messages_bounced.inc(len(messages))
    lines = env.policy.lines
    delays = {each.receipt: lines.bounce_delay_s(each.receives) for each in messages}
    for delay_s in sorted(set(delays.values())):
        group = [each for each in messages if delays[each.receipt] == delay_s]
        with suppress(Unavailable):  # They come back by themselves.
            await env.queue.bounce(group, delay_s=delay_s)
