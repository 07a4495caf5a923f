"""Uploaded lists as lines, from the job's own copy (docs/api.md, Uploaded lists).

A list is always read from its first byte: a walk that goes on skips the lines that are in. That
takes a second or two at the end of a million lines, and is the same for gzip as for plain text.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from itertools import islice

import trio

from conveyor.domain import limits
from conveyor.domain.inputs import UploadedList
from conveyor.domain.lists import Line, ListBroken, ListReader, ListTooLarge
from conveyor.usecases.env import Env

_SLICE_BYTES = 16 * 1024  # Of gzip, a slice may inflate to a thousand times as much.
_MAGIC_BYTES = 2


async def groups(env: Env, source: UploadedList) -> AsyncGenerator[list[Line], None]:
    """All lines, in fixed counts; ListUnusable where the list as a whole cannot be taken."""
    size = env.policy.chunk_tasks
    reader = ListReader(source.spec)
    group: list[Line] = []
    async with aclosing(_slices(env, source)) as slices:
        async for piece in slices:
            lines = reader.feed(piece)
            while batch := await _take_lines(env, reader, lines, size - len(group)):
                group += batch
                if len(group) == size:
                    yield group
                    group = []
    group += reader.end()
    for start in range(0, len(group), size):
        yield group[start : start + size]


async def count(env: Env, source: UploadedList) -> int:
    """How many lines the list has: exactly if they are few, else at most.

    A number too high is mended when the list is in; one too low would let the run look complete
    before it is. Whatever is too large is found out when it is ingested.
    """
    reader = ListReader(source.spec)
    lines, ends = 0, 0
    try:
        async with aclosing(_slices(env, source)) as slices:
            async for piece in slices:
                if lines < limits.LIST_COUNTED_MAX:
                    found = reader.feed(piece)
                    while batch := await _take_lines(env, reader, found, env.policy.chunk_tasks):
                        lines += len(batch)
                elif reader.is_gzip:
                    ends += await env.aside.do(partial(reader.count_ends, piece))
                else:
                    ends += reader.count_ends(piece)
        lines += sum(1 for _ in reader.end())
    except ListTooLarge:
        return limits.TASKS_MAX
    unended = 1 if ends else 0
    return min(lines + ends + unended, limits.TASKS_MAX)


async def _take_lines(
    env: Env, reader: ListReader, lines: Iterator[Line], count_max: int
) -> list[Line]:
    """The next of the lines, empty after the last. A slice of gzip may hold a thousand times as
    much, or blank lines only, so it is inflated and read aside.
    """
    take = partial(_take, lines, count_max)
    return await env.aside.do(take) if reader.is_gzip else take()


def _take(lines: Iterator[Line], count_max: int) -> list[Line]:
    return list(islice(lines, count_max))


async def _slices(env: Env, source: UploadedList) -> AsyncGenerator[bytes, None]:
    size_bytes = 0
    async with aclosing(env.blobs.open(source.key)) as pieces:
        async for piece in pieces:
            # The first bytes alone tell gzip, before any of it is inflated.
            head_bytes = min(len(piece), _MAGIC_BYTES) if not size_bytes else 0
            if head_bytes:
                yield piece[:head_bytes]
            size_bytes += len(piece)
            for start in range(head_bytes, len(piece), _SLICE_BYTES):
                await trio.lowlevel.checkpoint()
                yield piece[start : start + _SLICE_BYTES]
    if size_bytes != source.size_bytes:
        raise ListBroken("The list is not what it was when it was submitted.")
