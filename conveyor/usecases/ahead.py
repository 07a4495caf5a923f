"""Ahead: the next thing is made while the last one is used."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

import trio

from conveyor.domain.errors import ConveyorError

T = TypeVar("T")


async def use_each(source: AsyncGenerator[T, None], use: Callable[[T], Awaitable[bool]]) -> bool:
    """Uses one after the other; ends, and answers False, as soon as `use` does.

    At most one that is not used yet has been made, and another is in the making. What either side
    raises comes through by itself, not in a group.
    """
    made, taken = trio.open_memory_channel[T](0)
    failures: list[ConveyorError | ValueError] = []
    are_all_made = are_all_used = False

    async def make() -> None:
        nonlocal are_all_made
        with made:  # Not async: a cancellation there would hide what was raised.
            try:
                async with aclosing(source) as things:
                    async for thing in things:
                        await made.send(thing)
                are_all_made = True
            except (ConveyorError, ValueError) as error:
                failures.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(make)
        try:
            async for thing in taken:
                if not await use(thing):
                    nursery.cancel_scope.cancel()
                    break
            else:
                are_all_used = True
        except (ConveyorError, ValueError) as error:
            failures.append(error)
            nursery.cancel_scope.cancel()
    if failures:
        raise failures[0]
    return are_all_made and are_all_used
