"""TLS by name: trusted and matching certificates only, whatever address was dialled."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from conveyor.domain.addresses import TargetPolicy
from conveyor.net.dialer import default_tls
from conveyor.net.errors import TlsFailed
from conveyor.net.pool import HttpPool
from tests.net.conftest import get
from tests.net.server import Peer, answering, raw_server, reply


class Certificate:
    """A self-signed certificate for site.test and 127.0.0.1, on both ends."""

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


async def test_a_second_connection_resumes_the_session(site: Certificate) -> None:
    resumed: list[object] = []

    async def handler(peer: Peer) -> None:
        await peer.request()
        assert isinstance(peer.stream, trio.SSLStream)
        resumed.append(peer.stream.session_reused)
        await peer.send(reply(b"x"))

    pool = tls_pool(site.client)
    async with raw_server(handler, site.server) as server:
        await pool.fetch(get(f"https://site.test:{server.port}/"))
        pool.close()
        await pool.fetch(get(f"https://site.test:{server.port}/"))
        pool.close()

    assert resumed == [False, True]


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


async def test_a_server_that_speaks_no_tls_is_a_failure_of_tls(site: Certificate) -> None:
    async def handler(peer: Peer) -> None:
        await peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await peer.wait_closed()

    pool = tls_pool(site.client)
    async with raw_server(handler) as server:
        with pytest.raises(TlsFailed) as caught:
            await pool.fetch(get(f"https://site.test:{server.port}/"))

    assert not caught.value.is_untrusted
