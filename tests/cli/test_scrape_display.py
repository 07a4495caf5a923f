"""What `conveyor scrape` says: lines that fit, what a pipe gets, and what to do next."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest

from conveyor.cli.scrape.display import (
    RED,
    Display,
    Seen,
    pace,
    plain_line,
    render,
    summary_lines,
    unstyled,
)
from conveyor.cli.scrape.folder import cannot_write
from conveyor.cli.scrape.scraper import Progress

URL = f"https://slow.example/{'long/' * 40}"
SEEN = Seen(
    total=10_000,
    done=4_321,
    failures=[("target_404", 8), ("timeout", 4)],
    size_bytes=86_420_000,
    rate=1_234.0,
    bytes_rate=24_600_000.0,
    inflight=200,
    waits=["shop.example wants fewer requests: 12 s"],
    slow=["slow.example 3.2 s a page"],
    hanging=3,
    oldest_s=45.0,
    oldest_url=URL,
)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_line_fits_its_terminal(width: int) -> None:
    lines = [unstyled(line) for line in render(SEEN, width)]

    assert max(map(len, lines)) <= width
    assert lines[0].startswith("4,321 of 10,000   43%")
    assert lines[1].startswith("1,234 pages/s  5 s left")
    assert lines[1].split("  ")[-1] in {"200 in flight", "0 s"}
    assert lines[2] == "12 failed: 8 target_404, 4 timeout"
    assert lines[-1].startswith("3 pages hang, the oldest for 45 s: https://slow.example/")


def test_a_log_line_tells_the_same() -> None:
    line = plain_line(SEEN)

    assert "4,321 of 10,000 done, 12 failed" in line
    assert "waits: shop.example wants fewer requests: 12 s" in line
    assert "3 hang, the oldest for 45 s" in line


def test_a_terminal_shows_a_failure_on_one_line_and_a_pipe_shows_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    pipe = io.StringIO()
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb", 0) as screen, os.fdopen(theirs, "w") as terminal:
        Display(terminal).say_cut(RED, f"  timeout  {URL}")
        screen_text = unstyled(screen.read(4096).decode()).rstrip()

    Display(pipe).say_cut(RED, f"  timeout  {URL}")

    assert (len(screen_text), screen_text[-1]) == (60, "…")
    assert pipe.getvalue() == f"  timeout  {URL}\n"


def test_the_final_screen_counts_failures_by_reason() -> None:
    progress = Progress(13)
    progress.failures.update({"timeout": 1, "target_404": 12})

    lines = summary_lines(progress, 40.0, invalid=0, duplicates=0)

    assert unstyled(lines[0]) == "13 pages: 0 successful, 13 failed"
    assert lines[2] == "Failed: 12 target_404, 1 timeout"


def test_a_slow_site_has_a_rate_too() -> None:
    assert [pace(rate) for rate in (0.0, 0.3, 9.9, 1234.5)] == [
        "0 pages/s",
        "0.3 pages/s",
        "9.9 pages/s",
        "1,234 pages/s",
    ]


def test_a_full_disk_is_told_with_the_way_on() -> None:
    full = cannot_write(Path("pages"), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    forbidden = cannot_write(Path("pages"), PermissionError(errno.EACCES, "Permission denied"))

    assert str(full) == (
        "Cannot write to pages: No space left on device. "
        "The same command goes on once there is room."
    )
    assert str(forbidden) == "Cannot write to pages: Permission denied."
