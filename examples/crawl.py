"""Crawls a site from one page and saves what it keeps: python examples/crawl.py URL."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from conveyor_client import Client

SERVER = os.environ.get("CONVEYOR_URL", "http://127.0.0.1:8080")
API_KEY = os.environ.get("CONVEYOR_API_KEY", "dev")


def main(url: str, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    with Client(SERVER, API_KEY) as client:
        crawl = client.submit_crawl({"url": url, "depth": 3, "max_pages": 1000})
        kept = set()
        # The pages arrive while the crawl goes on.
        for result in client.crawl_results(crawl.crawl_id):
            print(result.url)
            kept.add(result.url)
        ended = client.crawl(crawl.crawl_id)
        # The job behind a crawl has the same id. It also fetches robots.txt and sitemaps.
        tasks = client.results(crawl.crawl_id, status="successful")
        good = [task.task_id for task in tasks if task.url in kept]
        client.download_all(crawl.crawl_id, {name: folder / f"{name}.html" for name in good})
    print(f"{ended.status}: {ended.coverage.pages_fetched} pages fetched, {len(good)} saved")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "https://example.com/", Path("pages"))
