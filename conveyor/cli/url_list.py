"""Reads a list of URLs, plain or gzip: one per line, without blank lines and # comments."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import click

from conveyor.domain.model import ListFormat, ListSpec
from conveyor.domain.submit.admission import TaskDraft
from conveyor.domain.submit.list_parser import Line, ListReader, ListUnusable
from conveyor.domain.submit.target import BadUrl, TargetPolicy, parse_url

SHOWN_MAX = 10
PIECE_BYTES = 256 * 1024


def read_lines(source: str) -> list[tuple[int, str]]:
    """Returns the line numbers and URLs of a file, or of standard input for `-`."""
    try:
        with sys.stdin.buffer if source == "-" else Path(source).open("rb") as file:
            return [(number, _url_of(draft, source)) for number, draft in _lines_in(file)]
    except OSError as error:
        raise click.ClickException(f"Cannot read {source}: {error.strerror}.") from None
    except ListUnusable as error:
        raise click.ClickException(f"{source}: {error}") from None


def _lines_in(file: BinaryIO) -> Iterator[Line]:
    reader = ListReader(ListSpec(ListFormat.TEXT))
    while piece := file.read(PIECE_BYTES):
        yield from reader.feed(piece)
    yield from reader.end()


def _url_of(draft: TaskDraft, source: str) -> str:
    if draft.flaw == "invalid_encoding":
        raise click.ClickException(f"{source} is not UTF-8 text. Give a file with one URL a line.")
    return "" if draft.url is None else str(draft.url)


def read_urls(source: str, targets: TargetPolicy | None, *, skip_invalid: bool) -> list[str]:
    """Returns the URLs of a list. Invalid lines raise an error, unless `skip_invalid`."""
    lines = read_lines(source)
    problems = {number: what for number, line in lines if (what := _problem(line, targets))}
    if problems and not skip_invalid:
        shown = [f"  line {number}: {what}" for number, what in list(problems.items())[:SHOWN_MAX]]
        if len(problems) > SHOWN_MAX:
            shown.append(f"  ... and {len(problems) - SHOWN_MAX:,} more")
        hint = "Mend them, or leave them out with --skip-invalid."
        count = f"{len(problems):,} of {len(lines):,} lines"
        raise click.ClickException("\n".join([f"{count} are no usable URL:", *shown, hint]))
    urls = [line for number, line in lines if number not in problems]
    if not urls:
        raise click.ClickException(f"{source} holds no URL. Give one a line.")
    return urls


def _problem(line: str, targets: TargetPolicy | None) -> str | None:
    target = parse_url(line)
    if isinstance(target, BadUrl):
        return f"{target.reason.value}: {target.detail}"
    return targets.forbids_target(target) if targets is not None else None
