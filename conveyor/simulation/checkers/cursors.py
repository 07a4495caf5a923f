"""Cursors: good for the list that answered with them, and for no other (I38)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import parse_qsl

from conveyor.simulation.history import Call
from conveyor.simulation.watcher import Moment

_RUN = re.compile(r"/runs/[^/]+(?=/results$)")


def a_cursor_fits_its_own_list(moment: Moment, call: Call) -> Iterator[str]:
    """I38: with any other tenant, job, run or filter a cursor is refused."""
    asked = _query(call)
    cursor = asked.pop("cursor", None)
    if cursor is None or not call.is_accepted:
        return
    for other in reversed(moment.history.calls):
        if other.method != "GET" or f'"{cursor}"'.encode() not in other.answer:
            continue
        shown = _query(other)
        shown.pop("cursor", None)
        if (other.tenant, _list(other), shown) != (call.tenant, _list(call), asked):
            yield f"call {call.number} went on with the cursor of call {other.number}"
        return


def _list(call: Call) -> str:
    """The results of a job are those of its latest run."""
    return _RUN.sub("", call.route)


def _query(call: Call) -> dict[str, str]:
    """What was asked for, but for how much of it; all is asked for without a word as well."""
    asked = dict(parse_qsl(call.path.partition("?")[2]))
    return {name: text for name, text in asked.items() if name != "limit" and text != "all"}
