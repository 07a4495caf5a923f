"""Over real sockets: what only a server and its protocol can get wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import httpx
import pytest
import trio

from conveyor.api.server.server import HttpServer
from tests.api.world import ANNA, World

pytestmark = pytest.mark.slow
KEY = f"X-API-Key: {ANNA}\r\n"


@dataclass(frozen=True, slots=True)
class Server:
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def exchange(self, raw: bytes, *, until_closed: bool = False) -> bytes:
        """Sends bytes as they are and reads until the server hangs up or falls silent."""
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        answer = b""
        async with stream:
            with suppress(trio.BrokenResourceError):  # It may have hung up on us already.
                await stream.send_all(raw)
            with (
                trio.fail_after(10) if until_closed else trio.move_on_after(0.3),
                suppress(trio.BrokenResourceError),
            ):
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
        "/../v1/jobs",
    ],
)
async def test_an_address_that_is_not_ours_is_not_found(world: World, target: str) -> None:
    async with served(world) as server:
        answer = await server.exchange(
            f"GET {target} HTTP/1.1\r\nHost: x\r\n{KEY}Connection: close\r\n\r\n".encode()
        )

    assert _status(answer) == 404
    assert b"application/problem+json" in answer


CHUNKED = "POST /v1/jobs HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
GET = "GET /healthz HTTP/1.1\r\nHost: x\r\n"
REFUSED = {
    "both framing headers": "POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
    "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
    "both, the other way round": "POST /v1/jobs HTTP/1.1\r\nHost: x\r\n"
    "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": f"{GET}Content-Length: 2\r\nContent-Length: 3\r\n\r\n{{}}",
    "two equal lengths": f"{GET}Content-Length: 2\r\nContent-Length: 2\r\n\r\n{{}}",
    "a list of lengths": f"{GET}Content-Length: 2, 2\r\n\r\n{{}}",
    "a negative length": f"{GET}Content-Length: -1\r\n\r\n",
    "a signed length": f"{GET}Content-Length: +1\r\n\r\nx",
    "a hexadecimal length": f"{GET}Content-Length: 0x2\r\n\r\n{{}}",
    "an empty length": f"{GET}Content-Length:\r\n\r\n",
    "two codings": f"{GET}Transfer-Encoding: chunked\r\n"
    "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "another coding": f"{GET}Transfer-Encoding: nonsense\r\n\r\n",
    "identity": f"{GET}Transfer-Encoding: identity\r\n\r\n",
    "a coding before chunked": f"{GET}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a vertical tab in the coding": f"{GET}Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": "POST / HTTP/1.0\r\nHost: x\r\n"
    "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a folded header": f"{GET}X: a\r\n b\r\n\r\n",
    "a folded coding": f"{GET}Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "a space before the first header": "GET /healthz HTTP/1.1\r\n Host: x\r\n\r\n",
    "bare line feeds": "GET /healthz HTTP/1.1\nHost: x\n\n",
    "one bare line feed": "GET /healthz HTTP/1.1\r\nHost: x\nX: y\r\n\r\n",
    "a bare line feed at the end": "GET /healthz HTTP/1.1\r\nHost: x\r\n\n",
    "a bare carriage return": "GET /healthz HTTP/1.1\r\nHost: x\rX: y\r\n\r\n",
    "NUL": f"{GET}X: a\0b\r\n\r\n",
    "a space before the colon": f"{GET}X : y\r\n\r\n",
    "a space in a name": f"{GET}Bad Header: y\r\n\r\n",
    "no name": f"{GET}: y\r\n\r\n",
    "no colon": f"{GET}nonsense\r\n\r\n",
    "no Host": "GET /healthz HTTP/1.1\r\n\r\n",
    "two Hosts": "GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "no version": "GET /healthz\r\n\r\n",
    "HTTP/0.9": "GET /healthz HTTP/0.9\r\nHost: x\r\n\r\n",
    "HTTP/1.2": "GET /healthz HTTP/1.2\r\nHost: x\r\n\r\n",
    "HTTP/2.0": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/3.7": "GET /healthz HTTP/3.7\r\nHost: x\r\n\r\n",
    "HTTP/1.1 in lower case": "GET /healthz http/1.1\r\nHost: x\r\n\r\n",
    "two spaces": "GET  /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
    "a method in lower case": "get /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
    "nonsense": "nonsense\r\n\r\n",
    "an absolute target": "GET http://other.example/healthz HTTP/1.1\r\nHost: x\r\n\r\n",
    "an authority as the target": "CONNECT other.example:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    "an asterisk": "OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    "a fragment": "GET /healthz#x HTTP/1.1\r\nHost: x\r\n\r\n",
    "letters as a chunk size": f"{CHUNKED}ZZ\r\n{{}}\r\n",
    "an empty chunk size": f"{CHUNKED}\r\n{{}}\r\n",
    "a prefixed chunk size": f"{CHUNKED}0x2\r\n{{}}\r\n0\r\n\r\n",
    "a signed chunk size": f"{CHUNKED}+2\r\n{{}}\r\n0\r\n\r\n",
    "a space behind a chunk size": f"{CHUNKED}2 \r\n{{}}\r\n0\r\n\r\n",
    "an underscore in a chunk size": f"{CHUNKED}1_0\r\n",
    "a huge chunk size": f"{CHUNKED}fffffffff\r\n",
    "a chunk size behind a line feed": f"{CHUNKED}2\n{{}}\r\n0\r\n\r\n",
    "a chunk that is too long": f"{CHUNKED}1\r\n{{}}\r\n0\r\n\r\n",
    "a long chunk extension": f"{CHUNKED}1;{'x' * 500}\r\n",
    "many chunk extensions": CHUNKED + f"1;{'x' * 100}\r\n \r\n" * 100,
    "a trailer": f"{CHUNKED}0\r\nContent-Length: 5\r\n\r\n",
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_request_that_can_be_read_in_two_ways_is_refused_and_its_connection_closed(
    world: World, name: str
) -> None:
    async with served(world) as server:
        answer = await server.exchange(REFUSED[name].encode("latin-1"), until_closed=True)

    assert _status(answer) == 400
    assert b"content-type: application/problem+json" in answer
    assert b"malformed_request" in answer
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (f"{GET}X: {'y' * 1_000_000}\r\n\r\n", 431),
        (GET + "".join(f"X-{number}: y\r\n" for number in range(200)) + "\r\n", 431),
        (f"GET /{'x' * 10_000} HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (f"GET /{'x' * 100_000}", 414),
        ("GET /healthz HTTP/1.1\r\nHost: \xff\r\n\r\n", 400),
    ],
)
async def test_a_head_beyond_its_bounds_is_refused_with_a_problem(
    world: World, raw: str, status: int
) -> None:
    async with served(world) as server:
        answer = await server.exchange(raw.encode("latin-1"))

    assert _status(answer) == status
    assert b"content-type: application/problem+json" in answer


async def test_chunks_with_a_short_extension_are_read(world: World) -> None:
    body = b'{"tasks":[{"url":"https://example.com/"}]}'
    head = (
        f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\n{KEY}Content-Type: application/json\r\n"
        "Connection: close\r\nTransfer-Encoding: Chunked\r\n\r\n"
    ).encode()
    chunks = b"%X;a=b\r\n%b\r\n" % (len(body[:9]), body[:9]) + b"%x\r\n%b\r\n0\r\n\r\n" % (
        len(body[9:]),
        body[9:],
    )
    async with served(world) as server:
        answer = await server.exchange(head + chunks)

    assert _status(answer) == 201


async def test_requests_sent_together_are_answered_in_turn(world: World) -> None:
    get = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    post = f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\n{KEY}Content-Length: 2\r\n\r\n{{}}".encode()
    async with served(world) as server:
        answer = await server.exchange(get + post + get)

    statuses = [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [200, 415, 200]


async def test_an_http_1_0_request_is_answered_and_its_connection_closed(world: World) -> None:
    async with served(world) as server:
        answer = await server.exchange(b"GET /healthz HTTP/1.0\r\n\r\n", until_closed=True)

    assert _status(answer) == 200
    assert b"connection: close" in answer
    assert b"transfer-encoding" not in answer


async def test_permission_to_send_a_body_is_given_only_where_it_is_read(world: World) -> None:
    body = b'{"tasks":[{"url":"https://example.com/"}]}'
    expecting = (
        f"POST %s HTTP/1.1\r\nHost: x\r\n{KEY}Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n"
    )
    async with served(world) as server:
        refused = await server.exchange((expecting % "/nowhere").encode())
        async with await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
            await stream.send_all((expecting % "/v1/jobs").encode())
            permitted = await stream.receive_some()
            await stream.send_all(body)
            answer = await _answer_on(stream)

    assert _status(refused) == 404
    assert b"100 Continue" not in refused
    assert permitted == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert _status(answer) == 201


async def test_an_upgrade_is_ignored_and_its_connection_closed(world: World) -> None:
    async with served(world) as server:
        for protocol in (b"h2c", b"websocket"):
            answer = await server.exchange(
                b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\n"
                b"Upgrade: " + protocol + b"\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
                until_closed=True,
            )

            assert _status(answer) == 200
            assert b"connection: close" in answer


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
