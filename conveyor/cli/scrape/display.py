"""The progress of a scrape: a few lines that are drawn anew on a terminal, otherwise a line every
few seconds.

Drawn without a library: its import would take longer than a short list.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO

from conveyor.cli.scrape.hosts import Host
from conveyor.cli.scrape.scraper import Progress, Scraper
from conveyor.config import wants_colour

DRAW_S = 0.2
PLAIN_S = 5.0
# The rate is measured over this time.
WINDOW_S = 10.0
# A page in flight for longer is shown.
HANGING_S = 10.0
HOSTS_SHOWN = 2
REASONS_SHOWN = 4
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
BOLD, RED, YELLOW, CYAN, DIM, PLAIN = (f"\x1b[{code}m" for code in (1, 31, 33, 36, 2, 0))


@dataclass(frozen=True, slots=True)
class Seen:
    """The figures that the progress display shows at one moment."""

    total: int
    done: int
    failures: Sequence[tuple[str, int]]
    size_bytes: int
    rate: float
    bytes_rate: float
    inflight: int
    waits: Sequence[str] = ()
    slow: Sequence[str] = ()
    hanging: int = 0
    oldest_s: float = 0.0
    oldest_url: str = ""
    elapsed_s: float = 0.0

    @property
    def failed(self) -> int:
        return sum(count for _, count in self.failures)

    @property
    def left_s(self) -> float | None:
        return (self.total - self.done) / self.rate if self.rate > 0 else None


class Meter:
    """Measures rates over the last seconds."""

    def __init__(self, started_at: float, done: int, size_bytes: int) -> None:
        self.started_at = started_at
        self._samples = deque([(started_at, done, size_bytes)])

    def sample(self, now: float, done: int, size_bytes: int) -> tuple[float, float]:
        """Returns pages and bytes a second."""
        self._samples.append((now, done, size_bytes))
        while len(self._samples) > 2 and now - self._samples[0][0] > WINDOW_S:
            self._samples.popleft()
        at, before, bytes_before = self._samples[0]
        seconds = max(now - at, 0.001)
        return (done - before) / seconds, (size_bytes - bytes_before) / seconds


def see(scraper: Scraper, meter: Meter, now: float, urls: Callable[[int], str]) -> Seen:
    """`now` is on the clock of the event loop."""
    progress = scraper.progress
    rate, bytes_rate = meter.sample(now, progress.done, progress.size_bytes)
    oldest = next(iter(progress.inflight.items()), None)
    hanging = 0
    for began_at in progress.inflight.values():
        if now - began_at < HANGING_S:
            break
        hanging += 1
    hosts = scraper.hosts.all()
    return Seen(
        total=progress.total,
        done=progress.done,
        failures=progress.failures.most_common(REASONS_SHOWN),
        size_bytes=progress.size_bytes,
        rate=rate,
        bytes_rate=bytes_rate,
        inflight=len(progress.inflight),
        waits=_waits(scraper, hosts, now),
        slow=_slow(hosts),
        hanging=hanging,
        oldest_s=now - oldest[1] if oldest else 0.0,
        oldest_url=urls(oldest[0]) if oldest else "",
        elapsed_s=now - meter.started_at,
    )


def _waits(scraper: Scraper, hosts: Sequence[Host], now: float) -> list[str]:
    waits: list[str] = []
    if scraper.hosts.paused_until > now:
        seconds = scraper.hosts.paused_until - now
        waits.append(f"the gateway takes no more calls for {span(seconds)}")
    paused = [host for host in hosts if host.paused_until > now]
    paused.sort(key=lambda host: -host.paused_until)
    waits += [
        f"{host.name} wants fewer requests: {span(host.paused_until - now)}"
        for host in paused[:HOSTS_SHOWN]
    ]
    waits += [f"robots.txt of {host.name}" for host in hosts if host.is_blocked][:HOSTS_SHOWN]
    if not waits:
        full = [host for host in hosts if host.ready and (host.is_full or host.interval_s)]
        for host in sorted(full, key=lambda host: -len(host.ready))[:1]:
            limit = f"{host.limit} at once" if host.is_full else f"{host.interval_s:g} s apart"
            waits.append(f"{len(host.ready):,} pages of {host.name}: {limit}")
    return waits


def _slow(hosts: Sequence[Host]) -> list[str]:
    slow = [host for host in hosts if host.inflight and host.mean_s >= 1.0]
    slow.sort(key=lambda host: -host.mean_s)
    return [f"{host.name} {host.mean_s:.1f} s a page" for host in slow[:HOSTS_SHOWN]]


def render(seen: Seen, width: int) -> list[str]:
    """Returns the lines of the display, each at most `width` columns wide."""
    share = seen.done / seen.total if seen.total else 1.0
    head = f"{seen.done:,} of {seen.total:,}  {share:4.0%}  "
    room = max(width - len(head) - 1, 4)
    filled = round(share * room)
    bar = f"{CYAN}{'━' * filled}{DIM}{'─' * (room - filled)}{PLAIN}"
    lines = [f"{BOLD}{head}{PLAIN}{bar}"]
    # The last ones give way on a narrow terminal.
    facts = [pace(seen.rate)]
    if seen.left_s is not None and seen.done < seen.total:
        facts.append(f"{span(seen.left_s)} left")
    facts += [size(seen.size_bytes), f"{size(seen.bytes_rate)}/s"]
    facts += [f"{seen.inflight:,} in flight", span(seen.elapsed_s)]
    while len("  ".join(facts)) > width and len(facts) > 1:
        facts.pop()
    lines.append(_fit("  ".join(facts), width))
    if seen.failed:
        reasons = ", ".join(f"{count:,} {error}" for error, count in seen.failures)
        lines.append(_styled(RED, f"{seen.failed:,} failed: {reasons}", width))
    lines += [_styled(YELLOW, f"waits  {wait}", width) for wait in seen.waits]
    if seen.slow:
        lines.append(_styled(YELLOW, f"slow   {', '.join(seen.slow)}", width))
    if seen.hanging:
        what = "page hangs" if seen.hanging == 1 else "pages hang"
        text = f"{seen.hanging:,} {what}, the oldest for {span(seen.oldest_s)}: {seen.oldest_url}"
        lines.append(_styled(YELLOW, text, width))
    return lines


def plain_line(seen: Seen) -> str:
    """Returns one line for logs and pipes."""
    parts = [f"{seen.done:,} of {seen.total:,} done", f"{seen.failed:,} failed"]
    parts += [pace(seen.rate), size(seen.size_bytes)]
    if seen.left_s is not None and seen.done < seen.total:
        parts.append(f"{span(seen.left_s)} left")
    parts += [f"waits: {wait}" for wait in seen.waits[:1]]
    if seen.hanging:
        parts.append(f"{seen.hanging} hang, the oldest for {span(seen.oldest_s)}")
    return "Scraping: " + ", ".join(parts)


def _styled(style: str, text: str, width: int) -> str:
    return f"{style}{_fit(text, width)}{PLAIN}"


def _fit(text: str, width: int) -> str:
    printable = "".join(sign if sign.isprintable() else "?" for sign in text)
    return printable if len(printable) <= width else f"{printable[: width - 1]}…"


def span(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:,.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
    return f"{seconds / 3600:,.1f} h"


def size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"


def pace(rate: float) -> str:
    return f"{rate:,.0f} pages/s" if rate >= 10 or not rate else f"{rate:,.1f} pages/s"


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def unstyled(text: str) -> str:
    return _STYLE.sub("", text)


class Display:
    """Writes to stderr. It draws over its own lines, and only on a terminal."""

    def __init__(self, out: TextIO | None = None, *, is_quiet: bool = False) -> None:
        self._out = out or sys.stderr
        self.is_quiet = is_quiet
        self.is_terminal = self._out.isatty()
        self._has_colour = wants_colour()
        self._drawn = 0
        self._plain_at = time.monotonic() + PLAIN_S

    @property
    def width(self) -> int:
        return shutil.get_terminal_size((80, 24)).columns

    def phase(self, text: str) -> None:
        """Shows what happens before pages are fetched."""
        if self.is_quiet:
            return
        if self.is_terminal:
            self._draw([_fit(text, self.width)])
        elif time.monotonic() >= self._plain_at:
            self._plain_at += PLAIN_S
            self.say(text)

    def update(self, seen: Seen) -> None:
        if self.is_quiet:
            return
        if self.is_terminal:
            self._draw(render(seen, self.width))
        elif time.monotonic() >= self._plain_at:
            self._plain_at = time.monotonic() + PLAIN_S
            self.say(plain_line(seen))

    def say(self, text: str) -> None:
        """Writes a line that stays."""
        if self.is_quiet:
            return
        self.clear()
        self._out.write(f"{self._coloured(text)}\n")
        self._out.flush()

    def say_cut(self, style: str, text: str) -> None:
        """Writes a line that stays. A terminal shows only what fits, so that lists of long URLs do
        not push the lines before them off the screen."""
        self.say(_styled(style, text, self.width) if self.is_terminal else text)

    def _coloured(self, text: str) -> str:
        return text if self.is_terminal and self._has_colour else unstyled(text)

    def clear(self) -> None:
        if self._drawn:
            self._out.write(f"\x1b[{self._drawn}F\x1b[J")
            self._out.flush()
            self._drawn = 0

    def _draw(self, lines: Sequence[str]) -> None:
        up = f"\x1b[{self._drawn}F" if self._drawn else ""
        text = "".join(f"\x1b[2K{self._coloured(line)}\n" for line in lines)
        self._out.write(f"{up}{text}\x1b[J")
        self._out.flush()
        self._drawn = len(lines)


def summary_lines(
    progress: Progress, seconds: float, *, invalid: int, duplicates: int
) -> list[str]:
    """Returns the first lines of the final screen."""
    rate = progress.fetched / max(seconds, 0.001)
    counts = [f"{progress.successful:,} successful"]
    counts.append(f"{RED}{progress.failed:,} failed{PLAIN}" if progress.failed else "0 failed")
    if invalid:
        counts.append(counted(invalid, "invalid line"))
    if duplicates:
        counts.append(counted(duplicates, "duplicate"))
    head = f"{BOLD}{counted(progress.total, 'page')}{PLAIN}: {', '.join(counts)}"
    now = f"{progress.fetched:,} fetched now in {seconds:,.1f} s, {pace(rate)}"
    lines = [head, f"{size(progress.size_bytes)}; {now}"]
    if len(progress.failures) > 1:
        reasons = progress.failures.most_common()
        lines.append("Failed: " + ", ".join(f"{count:,} {error}" for error, count in reasons))
    return lines
