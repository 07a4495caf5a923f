"""Over real sockets: what only a server and its protocol can get wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import httpx
import pytest
import trio

from conveyor.api.server import HttpServer
from tests.api.world import ANNA, World

pytestmark = pytest.mark.slow
KEY = f"X-API-Key: {ANNA}\r\n"


@dataclass(frozen=True, slots=True)
class Server:
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def exchange(self, raw: bytes) -> bytes:
        """Sends bytes as they are and reads until the server hangs up or falls silent."""
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        answer = b""
        async with stream:
            with suppress(trio.BrokenResourceError):  # It may have hung up on us already.
                await stream.send_all(raw)
            with trio.move_on_after(0.3), suppress(trio.BrokenResourceError):
                async for piece in stream:
                    answer += piece
        return answer


@asynccontextmanager
async def served(world: World) -> AsyncIterator[Server]:
    urls: list[str] = []
    server = HttpServer(
        make_app=lambda _: world.app, host="127.0.0.1", port=0, on_listening=urls.append
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        yield Server(int(urls[0].rpartition(":")[2]))
        nursery.cancel_scope.cancel()


def _status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


async def test_a_job_goes_in_and_its_body_comes_out(world: World) -> None:
    async with served(world) as server, httpx.AsyncClient(base_url=server.url) as client:
        headers = {"X-API-Key": ANNA}
        lines = [{"url": f"https://example.com/{index}"} for index in range(3)]
        job = (await client.post("/v1/jobs", json={"tasks": lines}, headers=headers)).json()
        for task in await world.tasks_of(job["job_id"], job["latest_run"]["run_id"]):
            await world.succeed(job["job_id"], task, b"x" * 200_000)

        page = (await client.get(f"/v1/jobs/{job['job_id']}/results", headers=headers)).json()
        bodies = [await client.get(row["result_url"]) for row in page["results"]]

    assert [(len(body.content), body.status_code) for body in bodies] == [(200_000, 200)] * 3
    assert all(body.headers["Content-Length"] == "200000" for body in bodies)
    assert page["results"][0]["result_url"].startswith(server.url)


async def test_a_head_request_carries_no_body(world: World) -> None:
    async with served(world) as server:
        answer = await server.exchange(
            f"HEAD /v1/jobs HTTP/1.1\r\nHost: x\r\n{KEY}Connection: close\r\n\r\n".encode()
        )

    assert _status(answer) == 200
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    "target",
    [
        "//v1/jobs",
        "/v1//jobs",
        "/v1/jobs/",
        "/v1%2Fjobs",
        "/v1/jobs/x%2Fstop",
        "/v1/jobs/..%2f..",
        "/v1/jobs/%00",
        "/v1/jobs/%ff%fe",
        "/v1/jobs/#x",
        "/../v1/jobs",
        "*",
        "http://other.example/nothing",
    ],
)
async def test_an_address_that_is_not_ours_is_not_found(world: World, target: str) -> None:
    async with served(world) as server:
        answer = await server.exchange(
            f"GET {target} HTTP/1.1\r\nHost: x\r\n{KEY}Connection: close\r\n\r\n".encode()
        )

    assert _status(answer) == 404
    assert b"application/problem+json" in answer


@pytest.mark.parametrize(
    "raw",
    [
        b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: nonsense\r\n\r\n",
        b"GET /v1/jobs HTTP/1.1\r\n\r\n",
        b"GET /v1/jobs HTTP/1.1\r\nHost: x\r\nBad Header: y\r\n\r\n",
        b"GET /v1/jobs HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 1_000_000 + b"\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET /v1/jobs HTTP/1.1\r\nHost: \xff\r\n\r\n",
        b"GET /v1/jobs HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_turned_away_and_never_as_a_page(
    world: World, raw: bytes
) -> None:
    async with served(world) as server:
        answer = await server.exchange(raw)
        alive = await server.exchange(
            b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )

    assert _status(answer) in {*range(400, 500), 501}
    assert b"<html" not in answer.lower()
    assert _status(alive) == 200


async def test_a_length_and_chunks_together_make_no_job(world: World) -> None:
    body = b'{"tasks":[{"url":"https://example.com/"}]}'
    head = (
        f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\n{KEY}Content-Type: application/json\r\n"
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    ).encode()
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    async with served(world) as server:
        answer = await server.exchange(head + chunked)

    # One reading of it, that of RFC 9112: chunks win, and no second request is seen in the rest.
    assert answer.count(b"HTTP/1.1 ") <= 1


async def test_ten_gigabytes_are_refused_on_their_announcement(world: World) -> None:
    raw = (
        f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\n{KEY}Content-Type: application/json\r\n"
        "Content-Length: 10737418240\r\n\r\n{"
    ).encode()
    async with served(world) as server:
        answer = await server.exchange(raw)

    assert _status(answer) == 413
    assert b"request_too_large" in answer


async def test_chunks_without_end_are_cut_off_at_the_cap(world: World) -> None:
    job = await world.submit()
    head = (
        f"POST /v1/jobs/{job['job_id']}/pause HTTP/1.1\r\nHost: x\r\n{KEY}"
        "Transfer-Encoding: chunked\r\n\r\n"
    ).encode()
    async with served(world) as server:
        answer = await server.exchange(head + b"4000\r\n%s\r\n" % (b" " * 0x4000) * 8)

    assert _status(answer) == 413


async def test_a_client_that_hangs_up_mid_download_hurts_nobody(world: World) -> None:
    job = await world.submit(1)
    (task,) = await world.tasks_of(job["job_id"], job["latest_run"]["run_id"])
    await world.succeed(job["job_id"], task, b"x" * 20_000_000)
    path = f"/v1/jobs/{job['job_id']}/tasks/{task.task_id}/content"
    async with served(world) as server:
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        await stream.send_all(f"GET {path} HTTP/1.1\r\nHost: x\r\n{KEY}\r\n".encode())
        await stream.receive_some(1000)
        await stream.aclose()
        await trio.sleep(0.05)
        alive = await server.exchange(
            b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )

    assert _status(alive) == 200


async def test_a_websocket_is_turned_away(world: World) -> None:
    raw = (
        b"GET /v1/jobs HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    async with served(world) as server:
        answer = await server.exchange(raw)

    assert _status(answer) == 403


async def test_a_storm_of_broken_requests_does_not_take_the_server_down(world: World) -> None:
    broken = (
        b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{}",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
    )

    async with served(world) as server:
        async with trio.open_nursery() as nursery:
            for number in range(120):
                nursery.start_soon(server.exchange, broken[number % len(broken)])
        async with httpx.AsyncClient(base_url=server.url) as client:
            alive = await client.get("/healthz")

    assert alive.status_code == 200


@pytest.mark.parametrize("head", [b"POST /v1/jobs", b"TRACE /v1/jobs", b"POST /nowhere"])
async def test_an_answer_that_comes_before_the_body_leaves_a_connection_that_answers(
    world: World, head: bytes
) -> None:
    early = head + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"
    async with (
        served(world) as server,
        await trio.open_tcp_stream("127.0.0.1", server.port) as stream,
    ):
        for _ in range(2):
            await stream.send_all(early)
            await trio.sleep(0.02)
            await stream.send_all(b"0123456789")
            answer = await _answer_on(stream)

            assert answer.startswith(b"HTTP/1.1 4")
            if b"connection: close" in answer:  # The body was late: that is said, too.
                break


async def test_an_early_answer_to_a_body_that_never_comes_says_that_it_hangs_up(
    world: World,
) -> None:
    async with served(world) as server:
        early = b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        async with stream:
            await stream.send_all(early)
            answer = b"".join([piece async for piece in stream])

    assert answer.startswith(b"HTTP/1.1 401")
    assert b"connection: close" in answer


async def _answer_on(stream: trio.SocketStream) -> bytes:
    """One answer with a Content-Length, from a connection that stays open."""
    answer = b""
    with trio.fail_after(5):
        while b"\r\n\r\n" not in answer:
            answer += await stream.receive_some()
        head, _, body = answer.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        while len(body) < length:
            body += await stream.receive_some()
    return answer
