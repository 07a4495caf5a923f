"""The feed as a stream, over real sockets: nothing lost, nothing twice, and an end."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
import trio

from conveyor.domain import limits
from conveyor.domain.ids import JobId, caller_id
from conveyor.domain.submit.admission import TaskDraft
from conveyor.usecases.event_log import EventWakeups
from conveyor.usecases.submit import jobs
from conveyor.usecases.submit.jobs import Submission
from tests.api.server.test_sockets import Server, served
from tests.api.world import ANNA, BERT, SECRET, World

pytestmark = pytest.mark.slow
DEADLINE_S = 20
LAST_CHUNK = "0"


@dataclass
class Reader:
    """Reads frames from one connection, line by line: the size of a chunk is no field of any."""

    stream: trio.SocketStream
    rest: bytes = b""

    async def line(self) -> str | None:
        """The next line; None at the end."""
        with trio.fail_after(DEADLINE_S):
            while b"\n" not in self.rest:
                piece = await self.stream.receive_some()
                if not piece:
                    return None
                self.rest += piece
        line, _, self.rest = self.rest.partition(b"\n")
        return line.decode().rstrip("\r")

    async def read(self, count: int) -> list[dict[str, str]]:
        frames: list[dict[str, str]] = []
        frame: dict[str, str] = {}
        while len(frames) < count:
            line = await self.line()
            assert line is not None, "it ended early"
            name, _, value = line.partition(": ")
            if value and name:
                frame[name] = value
            elif line == "" and "data" in frame:
                frames.append(frame)
                frame = {}
        return frames


@asynccontextmanager
async def following(
    server: Server, *, key: str = ANNA, last: str | None = None, query: str = ""
) -> AsyncIterator[Reader]:
    again = "" if last is None else f"Last-Event-ID: {last}\r\n"
    async with await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
        await stream.send_all(
            f"GET /v1/events{query} HTTP/1.1\r\nHost: x\r\nX-API-Key: {key}\r\n"
            f"Accept: text/event-stream\r\n{again}Connection: close\r\n\r\n".encode()
        )
        reader = Reader(stream)
        head = []
        while line := await reader.line():
            head.append(line.lower())
        assert head[0].startswith("http/1.1 200")
        assert "content-type: text/event-stream" in head
        yield reader


async def test_what_was_and_what_comes_arrive_in_order(world: World) -> None:
    await world.submit()
    async with served(world) as server, following(server) as reader:
        before = await reader.read(2)
        job = await world.submit()
        after = await reader.read(2)

    assert [frame["event"] for frame in before + after] == ["job.created", "run.created"] * 2
    assert [frame["id"] for frame in before + after] == ["1", "2", "3", "4"]
    assert json.loads(after[0]["data"])["data"] == {"job_id": job["job_id"]}


async def test_a_reader_that_comes_back_misses_nothing_and_hears_nothing_twice(
    world: World,
) -> None:
    heard: list[str] = []
    async with served(world) as server:
        await world.submit()
        last = None
        for _ in range(4):
            async with following(server, last=last) as reader:
                heard += [frame["id"] for frame in await reader.read(1)]
                last = heard[-1]
            await world.submit()

        async with following(server, last=last) as reader:
            heard += [frame["id"] for frame in await reader.read(6)]

    assert heard == [str(number) for number in range(1, 11)]


async def test_a_stream_may_begin_with_now(world: World) -> None:
    await world.submit()
    async with served(world) as server, following(server, query="?after=latest") as reader:
        await world.submit()
        (frame,) = await reader.read(1)

    assert frame["id"] == "3"


async def test_a_stream_carries_the_events_of_its_caller_only(world: World) -> None:
    async with served(world) as server, following(server, key=BERT) as reader:
        await world.submit(key=ANNA)
        theirs = await world.submit(key=BERT)
        frames = await reader.read(2)

    jobs = {json.loads(frame["data"])["data"]["job_id"] for frame in frames}
    assert jobs == {theirs["job_id"]}


async def test_what_another_process_did_is_found_without_being_told(world: World) -> None:
    async with served(world) as server, following(server) as reader:
        # The same rows, and readers of its own to wake.
        other_process = replace(world.env, news=EventWakeups())
        caller = caller_id(ANNA, SECRET)
        submission = Submission(drafts=[TaskDraft(url="https://example.com/")])
        await jobs.submit(other_process, caller, submission, job_id=JobId(world.env.new_id()))
        frames = await reader.read(2)

    assert [frame["id"] for frame in frames] == ["1", "2"]


async def test_a_stream_ends_when_the_server_goes(world: World) -> None:
    async with served(world) as server, following(server) as reader:
        world.is_ready[0] = False

        while await reader.line() != LAST_CHUNK:
            pass


async def test_a_silent_stream_says_that_it_is_still_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "EVENT_HEARTBEAT_S", 0.0)
    async with served(world) as server, following(server) as reader:
        lines = [await reader.line() for _ in range(12)]

    assert ": still here" in lines
