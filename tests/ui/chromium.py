"""The system's Chromium, driven by Playwright."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
# Written by `make test` from the npm package.
AXE = ROOT / ".venv" / "axe.min.js"
AA = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]


def find_chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def a_chromium() -> Iterator[Browser]:
    path = find_chromium()
    assert path is not None
    with plain_asyncio(), sync_playwright() as playwright:
        # Chromium's own sandbox does not start as root, and CI runs as root.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def plain_asyncio() -> Iterator[None]:
    """Gives Playwright a plain asyncio event loop. trio-asyncio, which other tests import, would
    give it one that runs on Trio; Playwright breaks that loop and with it every later test."""
    asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(None)


def violations(page: Any) -> list[str]:
    """The accessibility violations that axe-core finds on the open page, at level AA."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate(
        "tags => axe.run(document, {runOnly: {type: 'tag', values: tags}, iframes: false})", AA
    )
    return [
        f"{violation['id']}: {node['html'][:160]}"
        for violation in found["violations"]
        for node in violation["nodes"]
    ]
