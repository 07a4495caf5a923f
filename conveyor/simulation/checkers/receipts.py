"""Checks the receipts of stops: what they say about calls in flight is true for all processes
(I58)."""

from __future__ import annotations

from collections.abc import Iterator

from conveyor.simulation.client_history import Call, Fetch
from conveyor.simulation.invariant_monitor import StateChange


def a_stop_receipt_is_true(state: StateChange, call: Call) -> Iterator[str]:
    """I58: if a receipt says that 0 calls are in flight, no process has one; and with a gateway,
    every call that the stop ended counts as abandoned. This is checked only in undisturbed worlds:
    a paused process cannot report its calls."""
    receipt = _receipt_of(call)
    if receipt is None or not state.history.is_undisturbed:
        return
    run_id = call.json["run_id"]
    fetches = [fetch for fetch in state.history.fetches if fetch.run_id == run_id]
    open_count = sum(fetch.ended_at is None for fetch in fetches)
    if receipt["complete"] and receipt["inflight"] == 0 and open_count:
        yield f"call {call.number}: the receipt says 0 in flight, and {open_count} are"
    cut_off = sum(_is_cut_off(fetch, call) for fetch in fetches)
    if state.history.has_gateway and cut_off > receipt["abandoned"]:
        figures = f"{receipt['abandoned']} calls were abandoned, and {cut_off} were"
        yield f"call {call.number}: the receipt says {figures}"


def _receipt_of(call: Call) -> dict[str, int] | None:
    is_stop = call.method == "POST" and call.route.endswith(("/stop", "/cancel"))
    if not (is_stop and call.is_accepted):
        return None
    receipt: dict[str, int] | None = call.json.get("receipt")
    return receipt


def _is_cut_off(fetch: Fetch, call: Call) -> bool:
    """Whether the call had reached the gateway and was ended by this stop."""
    is_ended = fetch.ended_at is not None and fetch.ended_at >= call.sent_at
    return is_ended and not fetch.outcome and fetch.is_at_gateway
