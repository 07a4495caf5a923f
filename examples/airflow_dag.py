"""A daily list in Airflow: put this file among the DAGs, and install conveyor-client there.

Airflow repeats a task after a failure of its own. The idempotency key belongs to the DAG run, so a
repeated task finds the job that it submitted before, and no page is fetched twice.
"""

from __future__ import annotations

import os
from pathlib import Path

from conveyor_client import Client

SERVER = os.environ.get("CONVEYOR_URL", "http://127.0.0.1:8080")
API_KEY = os.environ.get("CONVEYOR_API_KEY", "dev")
URLS = ["https://example.com/"]


def scrape(urls: list[str], folder: str, run_id: str) -> dict[str, int]:
    """Fetches the list once for each `run_id` and saves the pages. Returns the counts."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with Client(SERVER, API_KEY) as client:
        job = client.submit(urls, idempotency_key=f"airflow-{run_id}")
        run = client.wait(job.job_id, timeout_s=3600)
        good = [task.task_id for task in client.results(job.job_id, status="successful")]
        client.download_all(job.job_id, {name: target / name for name in good})
    if run.stats.successful == 0:
        raise RuntimeError(f"no page of job {job.job_id} could be fetched")
    return {"successful": run.stats.successful, "failed": run.stats.failed}


try:
    from airflow.sdk import DAG, task
except ModuleNotFoundError:
    pass  # The function above works without Airflow, as its test shows.
else:
    with DAG("conveyor_prices", schedule="@daily", catchup=False):
        task(scrape)(URLS, "prices/{{ ds }}", "{{ run_id }}")
