"""Fetches a list of pages into a folder: python examples/sync_client.py URL ..."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from conveyor_client import ApiError, Client, ProgressBar

SERVER = os.environ.get("CONVEYOR_URL", "http://127.0.0.1:8080")
API_KEY = os.environ.get("CONVEYOR_API_KEY", "dev")


def main(urls: list[str], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    with Client(SERVER, API_KEY) as client:
        try:
            job = client.submit(urls)
        except ApiError as error:
            for line in error.invalid_tasks:
                print(f"line {line.index}: {line.reason}: {line.value}", file=sys.stderr)
            sys.exit(str(error))
        run = client.wait(job.job_id, ProgressBar())
        good = {task.task_id: task for task in client.results(job.job_id, status="successful")}
        client.download_all(job.job_id, {name: folder / f"{name}.html" for name in good})
        for name, task in good.items():
            print(f"{folder / name}.html is {task.url}")
        for task in client.results(job.job_id, status="failed"):
            print(f"{task.url} failed: {task.error.detail if task.error else task.reason}")
    print(f"{run.stats.successful} of {run.stats.total} pages")


if __name__ == "__main__":
    main(sys.argv[1:] or ["https://example.com/"], Path("pages"))
