"""`conveyor mcp`: the official client uses every tool over both transports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import httpx2
import mcp
import pytest
from mcp.client.streamable_http import streamable_http_client
from mcp.types import TextContent

from conveyor.sdk import Client
from tests.cli.mcp_session import (
    DOCUMENT,
    SESSIONS,
    framed,
    http_server,
    record_over,
    shop,
    stdio_session,
    transcript_in,
)
from tests.cli.program import Program, dev_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with dev_server(tmp_path_factory.mktemp("dev")) as url:
        yield url


@pytest.mark.parametrize("transport", SESSIONS)
async def test_a_session_goes_as_the_document_says(transport: str, tmp_path: Path) -> None:
    transcript = await record_over(transport, tmp_path)

    assert framed(transcript) == transcript_in(DOCUMENT.read_text())


async def test_every_tool_and_every_argument_but_the_obvious_describes_itself(server: str) -> None:
    async with stdio_session(server, "me") as client:
        tools = (await client.list_tools()).tools

    undescribed = [
        f"{tool.name}.{name}"
        for tool in tools
        for name, schema in tool.input_schema["properties"].items()
        if name != "limit" and "description" not in schema
    ]
    assert all(tool.description and tool.annotations for tool in tools)
    assert undescribed == []


async def test_a_job_that_makes_no_progress_says_why(server: str) -> None:
    with Client(server, "waiting") as caller:
        job_id = caller.submit({"status": "open"}).job_id
        caller.pause(job_id)
        caller.add_tasks(job_id, "https://example.com/", last=True)

    async with stdio_session(server, "waiting") as agent:
        status = await agent.call_tool("status", {"job_id": job_id, "wait_s": 0.1})
        stopped = await agent.call_tool("stop", {"job_id": job_id})

    assert status.structured_content is not None
    assert status.structured_content["waiting_on"]["reason"] == "paused"
    assert stopped.structured_content is not None
    assert stopped.structured_content["status"] == "stopped"


async def test_a_crawl_is_a_job_for_the_other_tools(server: str) -> None:
    with shop() as site:
        async with stdio_session(server, "crawls") as agent:
            crawl = await agent.call_tool("crawl", {"url": f"{site}/kettle", "pages_max": 5})
            assert crawl.structured_content is not None
            job = {"job_id": crawl.structured_content["job_id"]}
            terminal = False
            while not terminal:
                status = await agent.call_tool("status", {**job, "wait_s": 50})
                assert status.structured_content is not None
                terminal = status.structured_content["terminal"]
            results = await agent.call_tool("results", {**job, "status": "successful"})
            refused = await agent.call_tool("crawl", {"url": "ftp://shop.example/"})

    assert results.structured_content is not None
    urls = {page["url"] for page in results.structured_content["results"]}
    # What the site answers for robots.txt is a task of the job too.
    assert urls == {f"{site}/kettle", f"{site}/robots.txt"}
    assert refused.is_error


async def test_over_http_a_bearer_token_is_the_key_of_the_caller(server: str) -> None:
    with http_server(server, "mine") as address:
        async with mcp.Client(address) as client:
            await client.call_tool("submit", {"urls": ["https://example.com/"]})
            mine = await client.call_tool("list_jobs", {})
        headers = {"Authorization": "Bearer yours"}
        async with (
            httpx2.AsyncClient(headers=headers) as http,
            mcp.Client(streamable_http_client(address, http_client=http)) as client,
        ):
            yours = await client.call_tool("list_jobs", {})

    assert mine.structured_content is not None
    assert len(mine.structured_content["jobs"]) == 1
    assert yours.structured_content == {"jobs": []}


async def test_the_key_of_the_environment_is_not_lent_to_the_network(server: str) -> None:
    with http_server(server, "mine", "--host", "0.0.0.0") as address:
        async with mcp.Client(address.replace("0.0.0.0", "127.0.0.1")) as client:
            refused = await client.call_tool("list_jobs", {})

    (block,) = refused.content
    assert isinstance(block, TextContent)
    assert refused.is_error
    assert "Authorization: Bearer KEY" in block.text


def test_a_page_in_a_browser_cannot_reach_the_tools(server: str) -> None:
    with http_server(server, "mine") as address:
        answers = [
            httpx.post(address, json={}, headers=headers, trust_env=False).status_code
            for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"})
        ]

    assert answers == [421, 403]


def test_a_wrong_address_is_a_message(tmp_path: Path) -> None:
    ended = Program(tmp_path, {}).run("mcp", "--server", "nowhere")

    assert ended.code == 2
    assert "See --server" in ended.err
