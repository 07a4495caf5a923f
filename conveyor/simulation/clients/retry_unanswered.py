"""Insisting: when faults are over, clients ask again for whatever they were put off with."""

from __future__ import annotations

import trio

from conveyor.domain import limits
from conveyor.simulation.client_history import Call
from conveyor.simulation.clients.client import Client

_PATIENCE_S = limits.IDEMPOTENCY_CLAIM_S + 30.0
_AHEAD_S = 60.0


async def ask_again(client: Client) -> bool:
    """Sends every request with a key once more that never got a last word; whether any was. Whose
    claim was made by a clock that was ahead is told to wait, and comes back (seed 1556)."""
    open_calls = _put_off(client)
    if open_calls:
        await trio.sleep(_PATIENCE_S)
    for call in open_calls:
        await client.send_again(call)
    claimed = [call for call in _put_off(client) if b"idempotency_in_progress" in call.answer]
    if claimed:
        await trio.sleep(_AHEAD_S)
    for call in claimed:
        await client.send_again(call)
    return bool(open_calls)


def _put_off(client: Client) -> list[Call]:
    """The last of each request, where it had no answer or one for the time being."""
    last: dict[tuple[str, str | None, bytes], Call] = {}
    for call in client.stage.history.calls:
        if call.tenant == client.name and call.key is not None and call.method == "POST":
            last[call.path, call.key, call.body] = call
    return [call for call in last.values() if call.status in {None, 409, 500, 503}]
