"""Reading a list of URLs as people write them: a line each, blank lines and # comments skipped."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from conveyor.domain import limits
from conveyor.domain.addresses import TargetPolicy
from conveyor.domain.urls import BadUrl, parse_url

SHOWN_MAX = 10


def read_lines(source: str) -> list[tuple[int, str]]:
    """Line numbers and URLs of a file, or of standard input for `-`."""
    try:
        raw = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise click.ClickException(f"Cannot read {source}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise click.ClickException(
            f"{source} is not UTF-8 text. Give a file with one URL a line."
        ) from None
    stripped = ((number, line.strip()) for number, line in enumerate(text.splitlines(), start=1))
    return [(number, line) for number, line in stripped if line and not line.startswith("#")]


def read_urls(source: str, targets: TargetPolicy | None, *, skip_invalid: bool) -> list[str]:
    """The URLs of a list; an error that names the bad lines, unless they may be skipped."""
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
    if len(urls) > limits.TASKS_MAX:
        raise click.ClickException(f"{source} holds more than {limits.TASKS_MAX:,} URLs.")
    return urls


def _problem(line: str, targets: TargetPolicy | None) -> str | None:
    target = parse_url(line)
    if isinstance(target, BadUrl):
        return f"{target.reason.value}: {target.detail}"
    return targets.forbids_target(target) if targets is not None else None
