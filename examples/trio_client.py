"""Submits two jobs and waits for both at once: python examples/trio_client.py URL URL ..."""

from __future__ import annotations

import os
import sys

import trio
from conveyor_client import TrioClient

SERVER = os.environ.get("CONVEYOR_URL", "http://127.0.0.1:8080")
API_KEY = os.environ.get("CONVEYOR_API_KEY", "dev")


async def scrape(client: TrioClient, name: str, urls: list[str]) -> None:
    job = await client.submit({"name": name, "tasks": urls, "max_attempts": 2})
    run = await client.wait(job.job_id, timeout_s=600)
    print(f"{name}: {run.stats.successful} of {run.stats.total} pages")


async def main(urls: list[str]) -> None:
    half = (len(urls) + 1) // 2
    async with TrioClient(SERVER, API_KEY) as client, trio.open_nursery() as nursery:
        nursery.start_soon(scrape, client, "first", urls[:half])
        nursery.start_soon(scrape, client, "second", urls[half:] or urls)


if __name__ == "__main__":
    trio.run(main, sys.argv[1:] or ["https://example.com/"])
