"""AesVault: seals secrets with AES-256-GCM and signs with HMAC-SHA256 (SPEC.md 5.3).

Every use has its own key, derived from the one secret, so that nothing made for one use is of any
use for another. Sealed text is `v1.` and base64url of nonce, ciphertext and tag.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import tempfile
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from conveyor.engines.files import sync_directory
from conveyor.ports.vault import Unsealable

SECRET_BYTES = 32
NONCE_BYTES = 12
SIGNATURE_BYTES = 18  # 144 bits: beyond guessing, and base64 without padding.

_VERSION = "v1."


class AesVault:
    def __init__(self, secret: bytes, *, nonce: Callable[[int], bytes] = os.urandom) -> None:
        if len(secret) < SECRET_BYTES:
            raise ValueError(f"a vault's secret has at least {SECRET_BYTES} bytes")
        self._aead = AESGCM(_derive(secret, b"seal"))
        self._signing_key = _derive(secret, b"sign")
        self._nonce = nonce

    def seal(self, secret: bytes, *, place: str) -> str:
        nonce = self._nonce(NONCE_BYTES)
        return _VERSION + _encode(nonce + self._aead.encrypt(nonce, secret, place.encode()))

    def unseal(self, sealed: str, *, place: str) -> bytes:
        raw = _decode(sealed.removeprefix(_VERSION))
        # Written back it must be the same text: base64 has many spellings, we have made only one.
        if raw is None or sealed != _VERSION + _encode(raw) or len(raw) < NONCE_BYTES:
            raise Unsealable("not a sealed text")
        try:
            return self._aead.decrypt(raw[:NONCE_BYTES], raw[NONCE_BYTES:], place.encode())
        except InvalidTag:
            raise Unsealable("changed, or sealed for another place or by another vault") from None

    def sign(self, text: str, *, purpose: str) -> str:
        key = hmac.digest(self._signing_key, purpose.encode(), hashlib.sha256)
        return _encode(hmac.digest(key, text.encode(), hashlib.sha256)[:SIGNATURE_BYTES])


def load_or_create_secret(path: Path) -> bytes:
    """The secret kept in this file; the first to ask makes it, and everybody gets the same one."""
    try:
        return _load(path)
    except FileNotFoundError:
        pass
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    keep_once(path, os.urandom(SECRET_BYTES).hex())
    return _load(path)


def keep_once(path: Path, text: str) -> None:
    """Keeps the text durably in a new private file; a file that is there already stays as it is."""
    descriptor, scratch = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # 0600.
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        # A link puts the whole file there at once, and unlike a rename it never replaces another's.
        os.link(scratch, path)
        sync_directory(str(path.parent))
    except FileExistsError:
        pass
    finally:
        os.unlink(scratch)


def _load(path: Path) -> bytes:
    secret = bytes.fromhex(path.read_text(encoding="ascii"))
    if len(secret) < SECRET_BYTES:
        raise ValueError(f"{path} does not hold a secret of {SECRET_BYTES} bytes in hex")
    return secret


def _derive(secret: bytes, use: bytes) -> bytes:
    kdf = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"conveyor/v1/" + use)
    return kdf.derive(secret)


def _encode(raw: bytes) -> str:
    return urlsafe_b64encode(raw).rstrip(b"=").decode()


def _decode(text: str) -> bytes | None:
    try:
        return urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
    except ValueError:
        return None
