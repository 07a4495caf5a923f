"""Bodies are decoded up to a size limit: bombs, false lengths and endless streams are stopped early
(docs/engines.md, Decoding)."""

from __future__ import annotations

import collections
import contextlib
import gzip
import itertools
import random
import tracemalloc
import zlib
from collections.abc import Callable, Iterator

import brotli
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.http_client.errors import BadEncoding, BodyTooLarge, FetchFailed
from conveyor.http_client.pool import HttpPool
from conveyor.http_client.response_body import Decoder, Gzip, decoder_for
from tests.http_client.conftest import ALL_LARGE, MakePool, get
from tests.http_client.server import Peer, answering, chunked, raw_server, reply

MIB = 1024 * 1024
PAGE = b"".join(b"<p>%d</p>" % number for number in range(5000))


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}


def decode(encoding: str, data: bytes, *, bytes_max: int = 25 * MIB, step: int = 65536) -> bytes:
    decoder = decoder_for([encoding.encode()], bytes_max)
    assert decoder is not None
    body = bytearray()
    for start in range(0, len(data), step):
        for piece in decoder.decode(data[start : start + step]):
            body += piece
    decoder.finish()
    return bytes(body)


@pytest.mark.parametrize("encoding", ENCODERS)
@pytest.mark.parametrize("step", [1, 7, 65536])
def test_each_encoding_is_decoded_whatever_the_chunks(encoding: str, step: int) -> None:
    assert decode(encoding, ENCODERS[encoding](PAGE), step=step) == PAGE


@pytest.mark.parametrize("encoding", ENCODERS)
@pytest.mark.parametrize("kind", ["text", "zeros", "pairs"])
def test_a_page_of_many_chunks_is_decoded_completely(encoding: str, kind: str) -> None:
    page = {"text": PAGE * 5, "zeros": bytes(600_000), "pairs": b"ab" * 300_000}[kind]
    packed = ENCODERS[encoding](page)

    for step in (997, 65536, len(packed)):
        assert decode(encoding, packed, step=step) == page


def test_raw_deflate_is_decoded() -> None:
    assert decode("deflate", raw_deflate(PAGE)) == PAGE


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
@pytest.mark.parametrize("step", [1, 3, 65536])
def test_concatenated_members_are_one_body(encoding: str, step: int) -> None:
    pack = ENCODERS[encoding]

    assert decode(encoding, pack(b"one ") + pack(b"two"), step=step) == b"one two"


@pytest.mark.parametrize("encoding", sorted(ENCODERS.keys() - {"br"}))
@pytest.mark.parametrize("garbage", [b"x", b"\x1f", b"\x1fx", b"trailing garbage" * 9, b"\0" * 64])
@pytest.mark.parametrize("step", [1, 65536])
def test_other_bytes_after_the_stream_are_ignored(encoding: str, garbage: bytes, step: int) -> None:
    assert decode(encoding, ENCODERS[encoding](PAGE) + garbage, step=step) == PAGE


@pytest.mark.parametrize("step", [1, 65536])
def test_bytes_after_a_brotli_stream_are_an_error_whatever_the_chunks(step: int) -> None:
    with pytest.raises(BadEncoding):
        decode("br", brotli.compress(PAGE) + b"x", step=step)


@pytest.mark.parametrize("encoding", ENCODERS)
@pytest.mark.parametrize("keep", [0.2, 0.9])
def test_a_stream_that_ends_early_is_an_error(encoding: str, keep: float) -> None:
    packed = ENCODERS[encoding](PAGE)

    with pytest.raises(BadEncoding):
        decode(encoding, packed[: int(len(packed) * keep)])


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd"])
def test_a_body_that_is_not_encoded_as_declared_is_an_error(encoding: str) -> None:
    with pytest.raises(BadEncoding):
        decode(encoding, b"<html>plain text, whatever the header says</html>" * 10)


@pytest.mark.parametrize("values", [["gzip, gzip"], ["gzip", "br"], ["gzip,identity,gzip"]])
def test_more_than_one_layer_is_refused(values: list[str]) -> None:
    with pytest.raises(BadEncoding):
        decoder_for([value.encode() for value in values], MIB)


def test_an_unknown_encoding_is_refused() -> None:
    with pytest.raises(BadEncoding):
        decoder_for([b"compress"], MIB)


@pytest.mark.parametrize("values", [[], [b"identity"], [b""]])
def test_no_encoding_needs_no_decoder(values: list[bytes]) -> None:
    assert decoder_for(values, MIB) is None


def bits(text: str) -> bytes:
    """Packs bits as deflate and brotli do: the first is the lowest bit of the first byte."""
    return bytes(int(text[at : at + 8][::-1], 2) for at in range(0, len(text) // 8 * 8, 8))


def empty_dynamic_block() -> str:
    """A deflate block with its own code tables that contains only its end marker."""
    order = (16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1)

    def number(value: int, width: int) -> str:
        return format(value, f"0{width}b")[::-1]

    lengths = "".join(number(1 if code in {1, 18} else 0, 3) for code in order)
    zeros = "1" + number(138 - 11, 7) + "1" + number(118 - 11, 7)
    return "001" + number(0, 10) + number(len(order) - 4, 4) + lengths + zeros + "0" + "0" + "0"


EMPTY_BYTES = 600_000
CHECKED_ZSTD = zstandard.ZstdCompressor(write_checksum=True)
NO_OUTPUT: dict[str, tuple[str, bytes]] = {
    "zstd frames": ("zstd", bytes.fromhex("28b52ffd2000010000")),
    "zstd frames with a checksum": (
        "zstd",
        CHECKED_ZSTD.compress(b""),
    ),
    "zstd skippable frames": ("zstd", bytes.fromhex("502a4d1800000000")),
    "long zstd skippable frames": ("zstd", bytes.fromhex("502a4d1800100000") + bytes(4096)),
    "gzip members": ("gzip", gzip.compress(b"")),
    "gzip members of a byte": ("gzip", gzip.compress(b"x")),
    "zstd frames of a byte": ("zstd", zstandard.ZstdCompressor().compress(b"x")),
    "stored deflate blocks": ("deflate", b"\0\0\0\xff\xff"),
    "fixed deflate blocks": ("deflate", bits("0100000000" * 8)),
    "dynamic deflate blocks": ("deflate", bits(empty_dynamic_block() * 8)),
}
# The prefix that comes once, before all repetitions.
STARTS = {
    "zstd blocks": ("zstd", bytes.fromhex("28b52ffd2010"), bytes(3)),
    "brotli metadata": ("br", bits("00110000"), bits("01100000")),
    "gzip name": ("gzip", bytes.fromhex("1f8b0808000000000003"), b"n"),
}


@pytest.mark.parametrize("kind", [*NO_OUTPUT, *STARTS])
@pytest.mark.parametrize("step", [1000, 65536])
def test_input_that_produces_no_output_is_refused_early(kind: str, step: int) -> None:
    encoding, start, unit = STARTS.get(kind) or (NO_OUTPUT[kind][0], b"", NO_OUTPUT[kind][1])
    encoded = start + unit * (EMPTY_BYTES // len(unit))
    decoder = decoder_for([encoding.encode()], 25 * MIB)
    assert decoder is not None
    steps = (encoded[at : at + step] for at in range(0, len(encoded), step))

    with pytest.raises(BadEncoding, match=r"too many frames|far smaller"):
        collections.deque(itertools.chain.from_iterable(map(decoder.decode, steps)), maxlen=0)

    assert len(list(steps)) > 2  # The rest of the body was never read.


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_a_body_of_ordinary_concatenated_members_is_decoded(encoding: str) -> None:
    """Members of 64 KiB each, as bgzip and pzstd write them."""
    page = PAGE * 12
    members = [ENCODERS[encoding](page[at : at + 65536]) for at in range(0, len(page), 65536)]

    assert decode(encoding, b"".join(members)) == page


def test_a_body_that_takes_too_much_work_is_refused() -> None:
    seconds = itertools.count(step=0.3)
    decoder = Decoder(Gzip(), MIB, cpu_clock=lambda: next(seconds))

    with pytest.raises(BadEncoding, match="too much work"):
        for _ in decoder.decode(gzip.compress(PAGE * 10)):
            pass


@pytest.mark.parametrize("encoding", ENCODERS)
def test_incompressible_data_is_decoded(encoding: str) -> None:
    data = random.Random(1).randbytes(300_000)

    assert decode(encoding, ENCODERS[encoding](data)) == data


def gzip_bomb() -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    return b"".join(packer.compress(bytes(MIB)) for _ in range(300)) + packer.flush()


def brotli_bomb() -> bytes:
    packer = brotli.Compressor(quality=4)
    pieces: list[bytes] = [packer.process(bytes(MIB)) for _ in range(300)]
    return b"".join([*pieces, packer.finish()])


def zstd_bomb() -> bytes:
    packer = zstandard.ZstdCompressor().compressobj()
    return b"".join(packer.compress(bytes(MIB)) for _ in range(300)) + packer.flush()


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "bomb"), [("gzip", gzip_bomb), ("br", brotli_bomb), ("zstd", zstd_bomb)]
)
def test_a_bomb_is_refused_after_a_few_mebibytes(
    encoding: str, bomb: Callable[[], bytes], traced: None
) -> None:
    packed = bomb()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]

    with pytest.raises(BodyTooLarge):
        decode(encoding, packed)

    assert tracemalloc.get_traced_memory()[1] - before < 16 * MIB


@pytest.mark.parametrize("encoding", ENCODERS)
def test_a_body_with_a_low_compression_ratio_is_stopped_at_the_size_limit(encoding: str) -> None:
    packed = ENCODERS[encoding](PAGE)

    with pytest.raises(BodyTooLarge):
        decode(encoding, packed, bytes_max=len(PAGE) - 1)
    assert decode(encoding, packed, bytes_max=len(PAGE)) == PAGE


@pytest.mark.slow
@given(st.sampled_from(sorted(ENCODERS)), st.binary(max_size=200), st.integers(1, 50))
@settings(max_examples=300, deadline=None)
def test_no_input_crashes_a_decoder(encoding: str, data: bytes, step: int) -> None:
    packed = ENCODERS[encoding](b"page" * 20)
    cut = len(data) % len(packed)
    for attempt in (data, packed[:cut] + data):
        with contextlib.suppress(FetchFailed):
            decode(encoding, attempt, step=step, bytes_max=MIB)


async def test_an_encoded_page_is_returned_decoded(pool: HttpPool) -> None:
    answer = chunked(*[ENCODERS["br"](PAGE)], headers="Content-Encoding: br\r\n")
    async with raw_server(answering(answer)) as server:
        assert (await pool.fetch(get(server.url()))).body == PAGE
        assert pool.idle_count == 1


async def test_an_announced_length_above_the_limit_is_refused_without_reading(
    pool: HttpPool,
) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n"
    async with raw_server(answering(answer)) as server:
        with pytest.raises(BodyTooLarge):
            await pool.fetch(get(server.url()))


@pytest.mark.parametrize("head", ["Transfer-Encoding: chunked", "Connection: close"])
async def test_an_endless_body_is_stopped_at_the_size_limit(pool: HttpPool, head: str) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode())
        while True:
            await peer.send(b"2000\r\n" + b"x" * 0x2000 + b"\r\n")

    async with raw_server(handler) as server:
        with pytest.raises(BodyTooLarge):
            await pool.fetch(get(server.url(), body_bytes_max=300_000))


async def test_an_endless_stream_that_decodes_to_nothing_is_stopped_too(pool: HttpPool) -> None:
    empty = gzip.compress(b"")

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n")
        while True:
            await peer.send(empty * 1000)

    async with raw_server(handler) as server:
        with pytest.raises(BadEncoding, match="too many frames or members"):
            await pool.fetch(get(server.url(), body_bytes_max=100_000))


async def test_bytes_beyond_the_announced_length_are_not_part_of_the_body(pool: HttpPool) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n" + b"x" * 100_000
    async with raw_server(answering(answer)) as server:
        response = await pool.fetch(get(server.url()))

    assert response.body == b"x" * 10
    assert pool.idle_count == 0


async def test_an_unwanted_body_is_read_only_in_part_and_its_connection_closed(
    pool: HttpPool,
) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 1000000000\r\n\r\n")
        while True:
            await peer.send(b"x" * 65536)

    async with raw_server(handler) as server:
        response = await pool.fetch(get(server.url(), wants_body=lambda status: status == 200))

    assert (response.status, response.is_whole) == (404, False)
    assert len(response.body) == 65536
    assert pool.idle_count == 0


async def test_a_large_body_holds_a_permit_until_it_is_read(make_pool: MakePool) -> None:
    pool = make_pool(large_bodies_bytes_max=500_000, **ALL_LARGE)
    answers = (
        reply(b"x" * 200_000),
        chunked(ENCODERS["gzip"](PAGE * 4), headers="Content-Encoding: gzip\r\n"),
    )
    async with raw_server(answering(*answers)) as server:
        for caller in ("one", "another"):
            assert pool._body_memory.large.acquire_nowait(caller, 250_000)
        with pytest.raises(FetchFailed):
            await pool.fetch(get(server.url(), deadline_s=0.05))
        for caller in ("one", "another"):
            pool._body_memory.large.release(caller, count=250_000)
        assert len((await pool.fetch(get(server.url()))).body) == 200_000
        assert (await pool.fetch(get(server.url()))).body == PAGE * 4

    assert pool._body_memory.large.free_count == 500_000
