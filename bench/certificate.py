"""Creates a certificate authority and a certificate for 127.0.0.1 that last for one benchmark."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def make(folder: Path) -> tuple[Path, Path]:
    """Returns the CA file that clients trust, and the file with the server's certificate and
    key."""
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name = _name("bench authority")
    ca = _certificate_builder(ca_name, ca_name, ca_key, is_ca=True).sign(ca_key, hashes.SHA256())
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        _certificate_builder(_name("bench origin"), ca_name, key, is_ca=False)
        .add_extension(address, critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    trusted, proof = folder / "ca.pem", folder / "origin.pem"
    trusted.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    proof.write_bytes(
        certificate.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return trusted, proof


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _certificate_builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, *, is_ca: bool
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    constraints = x509.BasicConstraints(ca=is_ca, path_length=None)
    return (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(constraints, critical=True)
    )
