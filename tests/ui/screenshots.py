"""`python -m tests.ui.screenshots`: writes the screenshots of docs/dashboard.md."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.ui.chromium import AXE, ROOT, a_chromium, violations
from tests.ui.stage import a_stage, set_the_scene

IMAGES = ROOT / "docs" / "images" / "dashboard"
LOOKS = {
    "light": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "dark"},
    "narrow": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"},
}


def main() -> int:
    """Visits every page in every look, and checks it with axe-core on the way."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    count = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        a_stage(Path(folder) / "data") as stage,
        a_chromium() as browser,
    ):
        set_the_scene(stage)
        for look, options in LOOKS.items():
            context = browser.new_context(base_url=stage.url, **options)  # type: ignore[arg-type]
            page = context.new_page()
            for name, path in stage.paths.items():
                page.goto(path)
                page.wait_for_timeout(600)
                page.screenshot(path=IMAGES / f"{name}-{look}.png", full_page=True)
                if AXE.exists():
                    for line in violations(page):
                        count += 1
                        print(f"{name} {look}: {line}")
            context.close()
    print(f"{count} violations of level AA; screenshots in {IMAGES.relative_to(ROOT)}")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
