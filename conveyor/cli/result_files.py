"""Writes a finished run to a folder: one file per body, and a list with the result of each URL."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path

import msgspec
import trio

from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import Run, Task
from conveyor.domain.submit.scraper_params import extension_for
from conveyor.usecases.context import Context
from conveyor.usecases.lookup import pages_of

PAGE = 500
# Bodies that are read and written at the same time. Each one may be held in memory.
AT_ONCE_MAX = 8
LIST_NAME = "results.jsonl"


class CannotWrite(ConveyorError):
    """The folder for the pages cannot be created or written."""


class ResultLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of results.jsonl."""

    index: int
    url: str
    status: str
    file: str | None = None
    http_status: int | None = None
    sha256: str | None = None
    error: str | None = None
    detail: str | None = None


def make_folder(folder: Path) -> None:
    """Creates the folder. The command calls it first, so that no finished work lacks a folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(folder, error) from error


def _cannot_write(folder: Path, error: OSError) -> CannotWrite:
    return CannotWrite(f"Cannot write to {folder}: {error.strerror}.")


async def write_results(env: Context, run: Run, folder: Path) -> None:
    """Writes the bodies, named by their position in the list.

    It writes results.jsonl last, so that the list never names a file that is not there yet.
    """
    lines: list[ResultLine] = []
    room = trio.CapacityLimiter(AT_ONCE_MAX)

    async def write(task: Task) -> None:
        async with room:
            lines.append(await _write(env, task, folder))

    async with aclosing(pages_of(env, run, limit=PAGE)) as pages:
        async for page in pages:
            async with trio.open_nursery() as nursery:
                for task in page:
                    nursery.start_soon(write, task)
    lines.sort(key=lambda line: line.index)
    await _put(folder / LIST_NAME, msgspec.json.Encoder().encode_lines(lines))


async def _put(path: Path, content: bytes) -> None:
    scratch = trio.Path(path.with_name(f".{path.name}"))
    try:
        await scratch.write_bytes(content)
        await scratch.replace(path)
    except OSError as error:
        raise _cannot_write(path.parent, error) from error


async def _write(env: Context, task: Task, folder: Path) -> ResultLine:
    if task.result is None:
        problem = task.problem
        return ResultLine(
            task.index,
            task.url,
            task.status,
            error=problem.code if problem else None,
            detail=problem.detail if problem else None,
        )
    name = f"{task.index:06d}.{extension_for(task.result.content_type)}"
    async with aclosing(env.blobs.open(task.result.key)) as pieces:
        body = b"".join([piece async for piece in pieces])
    await _put(folder / name, body)
    return ResultLine(
        task.index,
        task.url,
        task.status,
        file=name,
        http_status=task.result.http_status,
        sha256=task.result.sha256,
    )
