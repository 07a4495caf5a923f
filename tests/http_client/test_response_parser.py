"""The end of a response is always certain: malformed responses are errors, complete ones are
exact."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.domain.submit.target import TargetPolicy
from conveyor.http_client.errors import BadResponse, ConnectionLost, FetchFailed
from conveyor.http_client.exchange import Request, Response, ResponseParser
from conveyor.http_client.pool import HttpPool
from tests.http_client.conftest import TLS, get, target
from tests.http_client.server import answering_then_closing, chunked, raw_server, reply

OK = b"HTTP/1.1 200 OK\r\n"


async def fetch_raw(pool: HttpPool, answer: bytes, method: str = "GET") -> Response:
    async with raw_server(answering_then_closing(answer)) as server:
        with trio.fail_after(5):
            return await pool.fetch(
                Request(method=method, target=target(server.url()), deadline_s=4)
            )


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (reply(b""), b""),
        (chunked(b"ab", b"c"), b"abc"),
        (OK + b"\r\nuntil the end", b"until the end"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + reply(b"real"), b"real"),
        (b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + chunked(b"real"), b"real"),
        (OK + b"Transfer-Encoding: Chunked\r\n\r\n1;ext=1\r\nx\r\n0\r\nTrailer: t\r\n\r\n", b"x"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", b""),
        (b"HTTP/1.1 999 Request denied\r\nContent-Length: 1\r\n\r\nx", b"x"),
        (b"HTTP/1.0 200 OK\r\n\r\nold", b"old"),
    ],
)
async def test_every_framing_returns_exactly_its_body(
    pool: HttpPool, answer: bytes, body: bytes
) -> None:
    assert (await fetch_raw(pool, answer)).body == body


async def test_the_answer_to_head_has_no_body_whatever_its_length_header(pool: HttpPool) -> None:
    response = await fetch_raw(pool, OK + b"Content-Length: 10\r\n\r\n", "HEAD")

    assert (response.status, response.body) == (200, b"")


@pytest.mark.parametrize(
    ("method", "status"),
    [("HEAD", "200 OK"), ("GET", "304 Not Modified"), ("GET", "204 No Content")],
)
@pytest.mark.parametrize("encoding", ["gzip", "unheard-of"])
async def test_headers_about_the_body_are_ignored_for_an_answer_without_a_body(
    pool: HttpPool, method: str, status: str, encoding: str
) -> None:
    head = f"HTTP/1.1 {status}\r\nContent-Length: 100000000\r\nContent-Encoding: {encoding}\r\n\r\n"

    response = await fetch_raw(pool, head.encode(), method)

    assert (response.body, response.is_whole) == (b"", True)
    assert response.header(b"content-encoding") == encoding


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        OK + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        OK + b"Content-Length: 3, 3\r\n\r\nabc",
        OK + b"Content-Length: +3\r\n\r\nabc",
        OK + b"Content-Length: -1\r\n\r\n",
        OK + b"Content-Length: 0x3\r\n\r\nabc",
        OK + b"Content-Length: \r\n\r\nabc",
        OK + b"Content-Length: 99999999999999999999999\r\n\r\nabc",
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nab\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n-1\r\nab\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\nab\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\nab\n0\n\n",
        OK + b"X: a\r\n folded\r\nContent-Length: 0\r\n\r\n",
        OK + b"X : space\r\nContent-Length: 0\r\n\r\n",
        OK + b"no colon\r\nContent-Length: 0\r\n\r\n",
        OK + b"X: nul\x00\r\nContent-Length: 0\r\n\r\n",
        OK + b"X: bare\rreturn\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/0.9 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 099 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nxxx",
        b"GET / HTTP/1.1\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.0\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        OK + b"A: b\r\n" * 300 + b"Content-Length: 0\r\n\r\n",
        OK + b"A: " + b"b" * 200_000,
        OK + b"A" * 200_000,
        b"HTTP/1.1 200 " + b"O" * 200_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000 + reply(b"late"),
        OK + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"e" * 200_000,
        OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\nT: " + b"t" * 200_000,
        OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"T: t\r\n" * 300 + b"\r\n",
    ],
)
async def test_a_response_with_ambiguous_framing_is_refused(pool: HttpPool, answer: bytes) -> None:
    with pytest.raises(BadResponse):
        await fetch_raw(pool, answer)

    assert pool.idle_count == 0


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200",
        OK,
        OK + b"Content-Length: 10\r\n\r\nshort",
        OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
)
async def test_a_response_that_ends_early_is_an_error(pool: HttpPool, answer: bytes) -> None:
    with pytest.raises(ConnectionLost):
        await fetch_raw(pool, answer)


@pytest.mark.parametrize("cut", range(1, 60, 7))
async def test_a_response_may_arrive_in_any_pieces(pool: HttpPool, cut: int) -> None:
    whole = chunked(b"first", b"second", headers="X-A: b\r\n")

    got = ResponseParser(has_body=True)
    for start in range(0, len(whole), cut):
        got.feed(whole[start : start + cut])

    assert got.is_reusable
    assert got.take() == b"firstsecond"
    assert got.headers == [(b"transfer-encoding", b"chunked"), (b"x-a", b"b")]


_FRAGMENTS = st.sampled_from(
    [
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.0 302 Found\r\n",
        b"Content-Length: 5\r\n",
        b"Content-Length: 0\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Content-Encoding: gzip\r\n",
        b"Connection: close\r\n",
        b"Location: http://169.254.169.254/\r\n",
        b"\r\n",
        b"\n",
        b"\r",
        b"5\r\nhello\r\n",
        b"0\r\n\r\n",
        b"hello",
        b"\x1f\x8b\x08\x00",
        b"\x00\xff",
    ]
)


@pytest.mark.slow
@given(st.lists(_FRAGMENTS | st.binary(max_size=8), max_size=14).map(b"".join))
@settings(max_examples=400, deadline=None)
def test_no_input_makes_the_reader_do_anything_but_finish_or_refuse(data: bytes) -> None:
    got = ResponseParser(has_body=True)
    try:
        for start in range(0, len(data), 5):
            got.feed(data[start : start + 5])
            got.take()
        got.end_of_stream()
    except FetchFailed:
        return

    assert got.is_done
    assert 200 <= got.status <= 999


@pytest.mark.slow
@given(answer=st.lists(_FRAGMENTS | st.binary(max_size=8), max_size=14).map(b"".join))
@settings(max_examples=60, deadline=None)
def test_no_answer_hangs_or_crashes_a_fetch_over_a_real_socket(answer: bytes) -> None:
    async def main() -> None:
        pool = HttpPool(TargetPolicy(allow_private=True), tls=TLS)
        try:
            await fetch_raw(pool, answer)
        except FetchFailed:
            pass
        finally:
            pool.close()

    trio.run(main)


async def test_a_valid_answer_after_an_invalid_one_is_read(pool: HttpPool) -> None:
    async with raw_server(answering_then_closing(OK + b"Content-Length: x\r\n\r\n")) as bad:
        with pytest.raises(BadResponse):
            await pool.fetch(get(bad.url()))

    assert (await fetch_raw(pool, reply(b"fine"))).body == b"fine"
