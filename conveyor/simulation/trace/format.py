"""Describes a call to an engine in one line, for readers of a trace and for its hash.

The line must not depend on the order of sets, so of a collection only its type and length appear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from conveyor.domain.changes import Applied, Change, Chunk, Enqueue, Insert, Update, Verdict, Write
from conveyor.domain.queries import TaskPage

_PLAIN = (str, int, float, bool, type(None))
# Longer values are cut, so that a line of the trace stays readable.
_SHOWN_CHARS = 40


def describe(method: str, args: Sequence[Any], answer: Any) -> str:
    describer = _DESCRIBERS.get(method)
    return describer(args, answer) if describer else _plainly(args, answer)


def _commit(args: Sequence[Any], verdicts: Sequence[Verdict]) -> str:
    return "; ".join(map(_change, args[0], verdicts))


def _change(change: Change, verdict: Verdict) -> str:
    writes = " + ".join(map(_write, change.writes))
    refs = sum(len(effect.refs) for effect in change.effects if isinstance(effect, Enqueue))
    sent = f" and {refs} refs" if refs else ""
    return f"{writes}{sent} -> {_verdict(verdict)}"


def _write(write: Write) -> str:
    key = f"{type(write.key).__name__.removesuffix('Key')}({_fields(write.key)})"
    match write:
        case Insert():
            status = getattr(write.row, "status", None)
            return f"insert {key}" + (f" {status}" if status else "")
        case Update():
            values = [f"{name}={_shown(value)}" for name, value in write.values.items()]
            values += [f"{name}{delta:+}" for name, delta in write.deltas.items()]
            return f"update {key} {' '.join(values)}"
        case _:
            return f"delete {key}"


def _verdict(verdict: Verdict) -> str:
    if isinstance(verdict, Applied):
        return "applied"
    return f"{type(verdict).__name__.lower()} at {type(verdict.key).__name__.removesuffix('Key')}"


def _put_chunk(args: Sequence[Any], verdict: Verdict) -> str:
    chunk: Chunk = args[0]
    size = f"{len(chunk.tasks)} rows, {len(chunk.refs)} refs from {chunk.done_before}"
    return f"{_fields(chunk.key)}: {size} under {chunk.epoch} -> {_verdict(verdict)}"


def _find(args: Sequence[Any], rows: Sequence[Any]) -> str:
    return f"{type(args[0]).__name__} -> {len(rows)} rows"


def _page_tasks(args: Sequence[Any], page: TaskPage) -> str:
    return f"{type(args[0]).__name__} -> {len(page.tasks)} rows until {page.until}"


def _read(args: Sequence[Any], row: Any) -> str:
    return f"{_fields(args[0])} -> {getattr(row, 'status', type(row).__name__)}"


def _messages(args: Sequence[Any], _: Any) -> str:
    return " ".join(f"{message.ref.run_id}/{message.ref.task_id}" for message in args[0])


def _receive(args: Sequence[Any], messages: Sequence[Any]) -> str:
    return f"{args[0]} -> " + " ".join(message.ref.task_id for message in messages)


def _plainly(args: Sequence[Any], answer: Any) -> str:
    return " ".join(map(_shown, args)) + f" -> {_shown(answer)}"


_DESCRIBERS: dict[str, Callable[[Sequence[Any], Any], str]] = {
    "commit": _commit,
    "put_chunk": _put_chunk,
    "find": _find,
    "page_tasks": _page_tasks,
    "read": _read,
    "ack": _messages,
    "bounce": _messages,
    "extend": _messages,
    "receive": _receive,
}


def _fields(key: Any) -> str:
    return " ".join(str(value) for value in msgspec.structs.astuple(key))


def _shown(value: Any) -> str:
    if isinstance(value, _PLAIN):
        return str(value)[:_SHOWN_CHARS]
    if isinstance(value, list | tuple | set | frozenset | dict | bytes):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__
