"""`python -m tests.ui.screenshots`: writes the screenshots of docs/dashboard.md."""

from __future__ import annotations

import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from tests.ui.chromium import AXE, ROOT, a_chromium, violations
from tests.ui.stage import a_stage, set_the_scene

IMAGES = ROOT / "docs" / "images" / "dashboard"
_OLD_TASKS = 4_000
LOOKS = {
    "light": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "dark"},
    "narrow": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"},
}


def give_history(database: Path, run_id: str) -> None:
    """Makes a run an hour older, with tasks that ended in that hour: the chart of a run that has
    just begun has one bar."""
    with closing(sqlite3.connect(database, timeout=30)) as connection, connection:
        find = "SELECT job_id, created_at FROM runs WHERE run_id = ?"
        job_id, created_at = connection.execute(find, (run_id,)).fetchone()
        begins = created_at - 3600
        connection.execute(
            "UPDATE runs SET created_at = ?, planned = planned + ?, total = total + ?"
            " WHERE run_id = ?",
            (begins, _OLD_TASKS, _OLD_TASKS, run_id),
        )
        more = {
            "admitted": _OLD_TASKS,
            "done": _OLD_TASKS,
            "successful": _OLD_TASKS,
            "stored_bytes": 20_000 * _OLD_TASKS,
        }
        sums = ", ".join(f"{name} = {name} + {count}" for name, count in more.items())
        connection.execute(f"UPDATE stats SET {sums} WHERE run_id = ? AND shard = 0", (run_id,))
        for minute in range(1, 60):
            at = begins + 60 * minute
            # From the 25th to the 35th minute few pages end, as during an outage.
            outage = max(0, min(minute - 25, 10))
            share = (minute - 0.8 * outage + (7 * minute % 5) / 8) / 53
            done = min(_OLD_TASKS, int(_OLD_TASKS * share))
            row = (job_id, run_id, int(at // 60), at, done, "{}", 20_000 * done, 0, 0)
            connection.execute(f"INSERT INTO samples VALUES ({', '.join('?' * len(row))})", row)


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
        live_run = stage.paths["run-live"].rpartition("/")[2]
        give_history(Path(folder) / "data" / "conveyor.db", live_run)
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
