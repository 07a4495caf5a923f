"""Handles each page as soon as it is there: python examples/asyncio_client.py URL ..."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from contextlib import aclosing

from conveyor_client import AsyncioClient

SERVER = os.environ.get("CONVEYOR_URL", "http://127.0.0.1:8080")
API_KEY = os.environ.get("CONVEYOR_API_KEY", "dev")


async def main(urls: list[str]) -> None:
    async with AsyncioClient(SERVER, API_KEY) as client:
        job = await client.submit(urls)
        # `aclosing` ends the generator at once if the block is left early.
        async with aclosing(client.as_completed(job.job_id)) as results:
            async for result in results:
                if result.status != "successful":
                    print(f"{result.url}: {result.reason}")
                    continue
                body = await client.content(job.job_id, result.task_id)
                title = re.search(rb"<title>(.*?)</title>", body)
                print(f"{result.url}: {title[1].decode() if title else 'no title'}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or ["https://example.com/"]))
