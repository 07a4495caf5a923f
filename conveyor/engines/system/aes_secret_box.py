"""AesSecretBox: seals secrets with AES-256-GCM and signs with HMAC-SHA256 (SPEC.md 5.3).

Every use has its own key, derived from the one secret, so that nothing made for one use is of any
use for another. Sealed text is `v1.` and base64url of nonce, ciphertext and tag.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
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
from conveyor.ports.secret_box import CannotUnseal, SecretBox, WrongSecret, make_check, opens_check

SECRET_BYTES = 32
NONCE_BYTES = 12
SIGNATURE_BYTES = 18  # 144 bits: beyond guessing, and base64 without padding.

_VERSION = "v1."


class AesSecretBox:
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
            raise CannotUnseal("not a sealed text")
        try:
            return self._aead.decrypt(raw[:NONCE_BYTES], raw[NONCE_BYTES:], place.encode())
        except InvalidTag:
            raise CannotUnseal("changed, or sealed for another place or by another vault") from None

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


# The secret check: a sealed text beside the data tells at a start that the secret is another one.
#
# With another secret no sealed header or key opens, every caller has another name, and so nobody
# finds their jobs: a process that was started so must not serve (SPEC.md 5.3).


log = logging.getLogger(__name__)

CHECK_FILE = "secret.check"


def check_secret(data_dir: Path, secret_box: SecretBox) -> None:
    """WrongSecret when the data directory was sealed with another; the first start makes the
    check."""
    path = data_dir / CHECK_FILE
    check = _read(path) or _make(path, secret_box)
    if check is not None and not opens_check(secret_box, check):
        raise WrongSecret(
            f"{data_dir} was sealed with another secret key: set CONVEYOR_SECRET_KEY to the one "
            "that it was made with (without it, put back its secret.key), or choose another "
            "directory with CONVEYOR_DATA_DIR"
        )


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        return None


def _make(path: Path, secret_box: SecretBox) -> str | None:
    """What the file holds now; None where there is no room for it, as on a full disk."""
    try:
        keep_once(path, make_check(secret_box))
        return _read(path)
    except OSError as error:
        log.warning("secret check not created", extra={"path": str(path), "cause": str(error)})
        return None


def refuse_lost_secret(data_dir: Path) -> None:
    """WrongSecret when data was sealed with a secret.key that is gone: a new one would not open
    it."""
    if (data_dir / CHECK_FILE).exists() and not os.path.lexists(data_dir / "secret.key"):
        raise WrongSecret(
            f"{data_dir / 'secret.key'} is missing, and the data was sealed with another secret: "
            "put it back, or set CONVEYOR_SECRET_KEY to the secret key that it was made with"
        )
