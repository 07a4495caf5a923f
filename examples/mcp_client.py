"""Uses the tools of `conveyor mcp` as an agent does: python examples/mcp_client.py URL ..."""

from __future__ import annotations

import os
import sys

import anyio
from mcp import Client, StdioServerParameters, stdio_client

SERVER = os.environ.get("CONVEYOR_URL", "http://127.0.0.1:8080")
API_KEY = os.environ.get("CONVEYOR_API_KEY", "dev")


async def main(urls: list[str]) -> None:
    command = StdioServerParameters(
        command="conveyor",
        args=["mcp"],
        env={"CONVEYOR_URL": SERVER, "CONVEYOR_API_KEY": API_KEY, "PATH": os.environ["PATH"]},
    )
    async with Client(stdio_client(command)) as client:
        tools = (await client.list_tools()).tools
        print("tools:", ", ".join(tool.name for tool in tools))

        submitted = await client.call_tool("submit", {"urls": urls})
        job = {"job_id": (submitted.structured_content or {})["job_id"]}
        terminal = False
        while not terminal:
            status = await client.call_tool("status", {**job, "wait_s": 30})
            terminal = (status.structured_content or {})["terminal"]

        results = await client.call_tool("results", {**job, "status": "successful"})
        for task in (results.structured_content or {})["results"]:
            arguments = {**job, "task_id": task["task_id"], "chars_max": 200}
            page = await client.call_tool("content", arguments)
            print(task["url"])
            print(getattr(page.content[0], "text", ""))


if __name__ == "__main__":
    anyio.run(main, sys.argv[1:] or ["https://example.com/"])
