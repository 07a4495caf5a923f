"""Repeats unanswered requests: once faults are over, clients ask again for every answer that they
are still missing."""

from __future__ import annotations

import trio

from conveyor.domain import limits
from conveyor.simulation.client_history import Call
from conveyor.simulation.clients.client import Client

# A claim on a key whose owner died has expired by then.
_CLAIM_EXPIRED_S = limits.IDEMPOTENCY_CLAIM_S + 30.0
# The clock of the owner may have been ahead by as much.
_CLOCK_AHEAD_S = 60.0


async def ask_again(client: Client) -> bool:
    """Repeats every request with a key that has no final answer; returns whether there was one. A
    claim that was made by a clock that was ahead lasts longer, so those requests are repeated once
    more (seed 1556)."""
    open_calls = _unanswered(client)
    if open_calls:
        await trio.sleep(_CLAIM_EXPIRED_S)
    for call in open_calls:
        await client.send_again(call)
    claimed = [call for call in _unanswered(client) if b"idempotency_in_progress" in call.answer]
    if claimed:
        await trio.sleep(_CLOCK_AHEAD_S)
    for call in claimed:
        await client.send_again(call)
    return bool(open_calls)


def _unanswered(client: Client) -> list[Call]:
    """The last call of each request that got no answer, or one that asks the client to try
    again."""
    last: dict[tuple[str, str | None, bytes], Call] = {}
    for call in client.sim.history.calls:
        if call.tenant == client.name and call.key is not None and call.method == "POST":
            last[call.path, call.key, call.body] = call
    return [call for call in last.values() if call.status in {None, 409, 500, 503}]
