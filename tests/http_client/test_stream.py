"""TLS: only trusted certificates for the requested name are accepted, whatever address is
dialled."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
import trio.testing
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from conveyor.domain.submit.target import TargetPolicy
from conveyor.http_client.connection_limits import PoolLimits
from conveyor.http_client.errors import TimedOut, TlsFailed
from conveyor.http_client.exchange import Request
from conveyor.http_client.pool import HttpPool
from conveyor.http_client.stream import default_tls
from tests.http_client.conftest import get, target
from tests.http_client.server import Peer, answering, raw_server, reply


class Certificate:
    """A self-signed certificate for site.test and 127.0.0.1, with the contexts of both sides."""

    def __init__(self, folder: Path) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "conveyor tests")])
        now = datetime.datetime.now(datetime.UTC)
        names = [x509.DNSName("site.test"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        self.certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(1)
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        pem = self.certificate.public_bytes(serialization.Encoding.PEM)
        path = folder / "site.pem"
        path.write_bytes(
            pem
            + key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        self.server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.server.load_cert_chain(path)
        self.server.set_alpn_protocols(["h2", "http/1.1"])
        self.client = default_tls()
        self.client.load_verify_locations(cadata=pem.decode())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return Certificate(tmp_path_factory.mktemp("tls"))


async def loopback(_host: str) -> Sequence[str]:
    return ["127.0.0.1"]


def tls_pool(context: ssl.SSLContext) -> HttpPool:
    return HttpPool(TargetPolicy(allow_private=True), lookup=loopback, tls=context)


@pytest.mark.parametrize("host", ["site.test", "127.0.0.1"])
async def test_a_trusted_site_is_read_over_one_kept_connection(
    site: Certificate, host: str
) -> None:
    pool = tls_pool(site.client)
    body = b"x" * 300_000
    async with raw_server(answering(reply(body)), site.server) as server:
        for _ in range(3):
            response = await pool.fetch(get(f"https://{host}:{server.port}/"))
            assert response.body == body
        pool.close()

    assert server.connections == 1


async def test_a_second_connection_resumes_a_tls_session_of_its_own_caller_only(
    site: Certificate,
) -> None:
    resumed: list[object] = []

    async def handler(peer: Peer) -> None:
        await peer.request()
        assert isinstance(peer.stream, trio.SSLStream)
        resumed.append(peer.stream.session_reused)
        await peer.send(reply(b"x"))

    pool = tls_pool(site.client)
    async with raw_server(handler, site.server) as server:
        for partition in ("a", "a", "b", "b"):
            await pool.fetch(get(f"https://site.test:{server.port}/", partition=partition))
            pool.close()

    assert resumed == [False, True, False, True]


async def test_a_certificate_for_another_name_is_not_trusted(site: Certificate) -> None:
    pool = tls_pool(site.client)
    async with raw_server(answering(reply(b"x")), site.server) as server:
        with pytest.raises(TlsFailed) as caught:
            await pool.fetch(get(f"https://other.test:{server.port}/"))

    assert caught.value.is_untrusted
    assert server.requests == []


async def test_a_self_signed_certificate_is_not_trusted(site: Certificate) -> None:
    pool = tls_pool(default_tls())
    async with raw_server(answering(reply(b"x")), site.server) as server:
        with pytest.raises(TlsFailed) as caught:
            await pool.fetch(get(f"https://site.test:{server.port}/"))

    assert caught.value.is_untrusted
    assert server.requests == []


async def test_a_server_without_tls_is_reported_as_a_tls_failure(site: Certificate) -> None:
    async def handler(peer: Peer) -> None:
        await peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await peer.wait_closed()

    pool = tls_pool(site.client)
    async with raw_server(handler) as server:
        with pytest.raises(TlsFailed) as caught:
            await pool.fetch(get(f"https://site.test:{server.port}/"))

    assert not caught.value.is_untrusted


class Slicing(trio.abc.Stream):
    """Sends data in small pieces, so that TLS records are split anywhere."""

    def __init__(self, stream: trio.abc.Stream, size_bytes: int) -> None:
        self._stream = stream
        self._size_bytes = size_bytes

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        for start in range(0, len(data), self._size_bytes):
            await self._stream.send_all(data[start : start + self._size_bytes])
            await trio.testing.wait_all_tasks_blocked()

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        await self._stream.aclose()


class Holding(Slicing):
    """Keeps the sent data while `is_holding`, so that a test can send it in parts."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        super().__init__(stream, size_bytes=65536)
        self.held: list[bytes] = []
        self.is_holding = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self.is_holding:
            self.held.append(bytes(data))
        else:
            await super().send_all(data)


@pytest.mark.parametrize("size_bytes", [7, 501, 16_000, 17_000])
async def test_tls_records_may_arrive_in_any_pieces(site: Certificate, size_bytes: int) -> None:
    body = b"x" * max(40_000 if size_bytes > 500 else 400, size_bytes)

    async def handler(peer: Peer) -> None:
        assert isinstance(peer.stream, trio.SocketStream)
        sliced = Slicing(peer.stream, size_bytes)
        inside = trio.SSLStream(sliced, site.server, server_side=True, https_compatible=True)
        while await inside.receive_some():
            await inside.send_all(reply(body))

    pool = tls_pool(site.client)
    async with raw_server(handler) as server:
        for _ in range(3):
            assert (await pool.fetch(get(f"https://site.test:{server.port}/"))).body == body
        pool.close()

    assert server.connections == 1


async def test_a_large_request_is_sent_completely(site: Certificate) -> None:
    body = b"y" * 3_000_000
    pool = tls_pool(site.client)
    async with raw_server(answering(reply(b"taken")), site.server) as server:
        url = f"https://site.test:{server.port}/"
        response = await pool.fetch(Request(method="POST", target=target(url), body=body))
        pool.close()

    assert response.body == b"taken"
    assert server.requests[0].endswith(body)


async def test_a_body_without_a_length_ends_with_the_connection(site: Certificate) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\nto the end")
        assert isinstance(peer.stream, trio.SSLStream)
        await peer.stream.transport_stream.aclose()

    pool = tls_pool(site.client)
    async with raw_server(handler, site.server) as server:
        response = await pool.fetch(get(f"https://site.test:{server.port}/"))

    assert response.body == b"to the end"


async def test_a_tls_close_notify_ends_a_body_while_the_socket_stays_open(
    site: Certificate,
) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        assert isinstance(peer.stream, trio.SSLStream)
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\nto the end")
        await peer.stream.unwrap()
        await peer.stream.transport_stream.receive_some()

    pool = tls_pool(site.client)
    async with raw_server(handler, site.server) as server:
        response = await pool.fetch(get(f"https://site.test:{server.port}/"))

    assert response.body == b"to the end"


async def test_a_kept_connection_with_part_of_a_tls_record_is_not_reused(site: Certificate) -> None:
    async def handler(peer: Peer) -> None:
        assert isinstance(peer.stream, trio.SocketStream)
        holding = Holding(peer.stream)
        inside = trio.SSLStream(holding, site.server, server_side=True, https_compatible=True)
        await inside.receive_some()
        holding.is_holding = True
        await inside.send_all(reply(b"honest"))
        await inside.send_all(reply(b"poison"))
        honest, poison = holding.held
        await peer.send(honest + poison[:20])
        await inside.receive_some()
        await peer.send(poison[20:])

    pool = tls_pool(site.client)
    async with raw_server(handler) as server:
        for _ in range(2):
            response = await pool.fetch(get(f"https://site.test:{server.port}/"))
            assert response.body == b"honest"
        pool.close()

    assert server.connections == 2


async def test_a_tls_peer_that_sends_nothing_ends_a_fetch(site: Certificate) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.wait_closed()

    pool = HttpPool(
        TargetPolicy(allow_private=True),
        PoolLimits(read_timeout_s=0.03),
        lookup=loopback,
        tls=site.client,
    )
    async with raw_server(handler, site.server) as server:
        with pytest.raises(TimedOut):
            await pool.fetch(get(f"https://site.test:{server.port}/"))
    assert pool.idle_count == 0


async def test_a_handshake_without_an_answer_ends_at_the_connect_timeout(site: Certificate) -> None:
    async def handler(peer: Peer) -> None:
        await peer.wait_closed()

    pool = HttpPool(
        TargetPolicy(allow_private=True),
        PoolLimits(connect_timeout_s=0.03),
        lookup=loopback,
        tls=site.client,
    )
    async with raw_server(handler) as server:
        with pytest.raises(TimedOut):
            await pool.fetch(get(f"https://site.test:{server.port}/"))
        while server.closed < 1:
            await trio.sleep(0.001)
