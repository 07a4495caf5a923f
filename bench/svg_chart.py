"""Draws bar charts as SVG files, without a library."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import msgspec

RESULTS = Path(__file__).parent / "results"
WIDTH, BAR, GAP, LEFT, TOP = 760, 22, 8, 210, 34
PLAIN, NOTED = (
    120,
    430,
)  # The width left for the text after the longest bar, without and with notes.
COLOURS = ("#8a94a6", "#2f6f8f", "#3f9f6f", "#c9803f", "#b0524f", "#7a5fa0")


class Panel(msgspec.Struct, frozen=True):
    """One chart with a bar for each label. `notes` are shown after the bars; `most` is the value
    whose bar has full width, by default the highest one."""

    title: str
    bars: Sequence[tuple[str, float]]
    unit: str = ""
    notes: Sequence[str] = ()
    most: float | None = None


def figure_path(name: str, *, is_full_run: bool) -> Path:
    """Returns the path of a figure. Partial runs get another name, as full ones are committed."""
    return RESULTS / (f"{name}.svg" if is_full_run else f"{name}-part.svg")


def is_full_run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> bool:
    """Returns whether a bench runs with its default options; `--json` does not count."""
    chosen = {name: value for name, value in vars(options).items() if name != "json"}
    return all(parser.get_default(name) == value for name, value in chosen.items())


def draw(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Writes the panels one below the other."""
    parts = [f'<text x="12" y="22" font-size="16" font-weight="bold">{escape(title)}</text>']
    y = TOP
    for panel in panels:
        parts.append(f'<text x="12" y="{y + 16}" font-weight="bold">{escape(panel.title)}</text>')
        y += 26
        most = panel.most or max((value for _, value in panel.bars), default=1.0) or 1.0
        for number, (label, value) in enumerate(panel.bars):
            note = f" · {panel.notes[number]}" if panel.notes else ""
            text = f"{_number(value)} {panel.unit}".rstrip() + note
            parts += _bar(y, label, value / most, text, number, NOTED if panel.notes else PLAIN)
            y += BAR + GAP
        y += 12
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="white"/>'
        + "".join(parts)
        + "</svg>\n"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _bar(y: int, label: str, share: float, text: str, number: int, right: int) -> list[str]:
    width = max(2, round(share * (WIDTH - LEFT - right)))
    middle = y + BAR - 6
    colour = COLOURS[number % len(COLOURS)]
    size = f'width="{width}" height="{BAR}"'
    return [
        f'<text x="{LEFT - 8}" y="{middle}" text-anchor="end">{escape(label)}</text>',
        f'<rect x="{LEFT}" y="{y}" {size} rx="3" fill="{colour}"/>',
        f'<text x="{LEFT + width + 6}" y="{middle}">{escape(text)}</text>',
    ]
