"""Damage of stored bodies is told to the operator, wherever in a download it is found
(docs/storage.md, Damaged bodies)."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager

from conveyor.domain.errors import NotFound, ResultDamaged

log = logging.getLogger(__name__)


@contextmanager
def telling_damage(what: Mapping[str, str]) -> Iterator[None]:
    """`what` names the body: ids and its key, nothing of its content."""
    try:
        yield
    except ResultDamaged as error:
        _tell(logging.ERROR, "a stored body is damaged", what, error)
        raise
    except NotFound as error:
        _tell(logging.WARNING, "a stored body is missing", what, error)
        raise


async def tell_damage(
    pieces: AsyncGenerator[bytes, None], what: Mapping[str, str]
) -> AsyncGenerator[bytes, None]:
    """The same for a body that is under way: the error breaks the connection off, so that the
    caller misses the end of the body."""
    try:
        with telling_damage(what):
            async for piece in pieces:
                yield piece
    finally:
        await pieces.aclose()


def _tell(level: int, message: str, what: Mapping[str, str], error: Exception) -> None:
    log.log(level, message, extra={**what, "cause": str(error)})
