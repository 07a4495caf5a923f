"""The system engine: real and virtual clocks (SPEC.md 4.22), and the secret box (SPEC.md 5.3).

The box seals secrets with AES-256-GCM and signs with HMAC-SHA256. Each use has a key of its own,
derived from the one secret, so that a text made for one use is worthless for another. Sealed text
is `v1.` and base64url of nonce, ciphertext and tag. The place is authenticated with the text: a
sealed text that is moved to another row does not open there.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import tempfile
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import trio

from conveyor.engines.executor import sync_directory
from conveyor.ports.secret_box import CannotUnseal, SecretBox, WrongSecret, make_check, opens_check

SECRET_BYTES = 32
NONCE_BYTES = 12  # The nonce size of GCM. A new random nonce is used for every sealed text.
# 144 bits cannot be guessed, and 18 bytes are base64 without padding. Signatures are part of
# cursors and links, so a longer one makes those longer.
SIGNATURE_BYTES = 18

# Every page of a job needs the job's secrets, and opening one takes as long as a row's update. A
# process works on fewer jobs than this at a time.
_UNSEALED_MAX = 256

_VERSION = "v1."
# A secret key that is the secret which an embedded engine made for itself.
_CONTENT_OF_FILE = re.compile(r"secret\.key:([0-9a-f]{64})")


class AesSecretBox:
    def __init__(self, secret: bytes, *, nonce: Callable[[int], bytes] = os.urandom) -> None:
        if len(secret) < SECRET_BYTES:
            raise ValueError(f"a vault's secret has at least {SECRET_BYTES} bytes")
        # Imported here: the import takes 40 ms, and a process that only fetches has no secrets.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._aead = AESGCM(_derive(secret, b"seal"))
        self._signing_key = _derive(secret, b"sign")
        self._nonce = nonce
        self._unseal = lru_cache(_UNSEALED_MAX)(self._decrypt)

    def seal(self, secret: bytes, *, place: str) -> str:
        nonce = self._nonce(NONCE_BYTES)
        return _VERSION + _encode(nonce + self._aead.encrypt(nonce, secret, place.encode()))

    def unseal(self, sealed: str, *, place: str) -> bytes:
        return self._unseal(sealed, place)

    def _decrypt(self, sealed: str, place: str) -> bytes:
        raw = _decode(sealed.removeprefix(_VERSION))
        # base64 has several spellings of the same bytes. Only the one that `seal` makes is
        # accepted, so that a sealed text cannot be varied.
        if raw is None or sealed != _VERSION + _encode(raw) or len(raw) < NONCE_BYTES:
            raise CannotUnseal("not a sealed text")
        from cryptography.exceptions import InvalidTag

        try:
            return self._aead.decrypt(raw[:NONCE_BYTES], raw[NONCE_BYTES:], place.encode())
        except InvalidTag:
            raise CannotUnseal("changed, or sealed for another place or by another vault") from None

    def sign(self, text: str, *, purpose: str) -> str:
        key = hmac.digest(self._signing_key, purpose.encode(), hashlib.sha256)
        return _encode(hmac.digest(key, text.encode(), hashlib.sha256)[:SIGNATURE_BYTES])


def secret_of(key: str) -> bytes:
    """Returns the secret that a secret key stands for."""
    if (content := _CONTENT_OF_FILE.fullmatch(key)) is not None:
        return bytes.fromhex(content[1])
    # Hashed, so that a key of any length gives 32 bytes.
    return hashlib.sha256(key.encode()).digest()


def load_or_create_secret(path: Path) -> bytes:
    """Returns the secret in this file. The first process creates it; all processes get the same."""
    try:
        return _load(path)
    except FileNotFoundError:
        pass
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    keep_once(path, os.urandom(SECRET_BYTES).hex())
    # Read again: another process may have created the file first, with another secret.
    return _load(path)


def keep_once(path: Path, text: str) -> None:
    """Stores the text durably in a new private file. An existing file is not changed."""
    descriptor, scratch = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # 0600.
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode() + b"\n")
            file.flush()
            # Sync before the link: after a power cut the name must not belong to an empty file.
            os.fsync(file.fileno())
        # A link makes the whole file appear at once. A rename would replace the file of another
        # process; a link fails if the name exists.
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
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    kdf = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"conveyor/v1/" + use)
    return kdf.derive(secret)


def _encode(raw: bytes) -> str:
    return urlsafe_b64encode(raw).rstrip(b"=").decode()


def _decode(text: str) -> bytes | None:
    try:
        return urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
    except ValueError:
        return None


# The secret check: a sealed text beside the data shows at a start whether the secret has changed.
#
# With another secret no sealed header or key can be unsealed, and every caller gets another id and
# does not find its jobs. A process with another secret must therefore not serve (SPEC.md 5.3).


log = logging.getLogger(__name__)

CHECK_FILE = "secret.check"


def check_secret(data_dir: Path, secret_box: SecretBox) -> None:
    """Raises WrongSecret if the data directory was sealed with another secret. The first start
    creates the check."""
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
    """Creates the file and returns its content; None if it cannot be written (a full disk)."""
    try:
        keep_once(path, make_check(secret_box))
        return _read(path)
    except OSError as error:
        log.warning("secret check not created", extra={"path": str(path), "cause": str(error)})
        return None


def refuse_lost_secret(data_dir: Path) -> None:
    """Raises WrongSecret if the data was sealed with a secret.key that is missing now.

    Without this check the process would create a new secret, which cannot unseal the data.
    """
    if (data_dir / CHECK_FILE).exists() and not os.path.lexists(data_dir / "secret.key"):
        raise WrongSecret(
            f"{data_dir / 'secret.key'} is missing, and the data was sealed with another secret: "
            "put it back, or set CONVEYOR_SECRET_KEY to the secret key that it was made with"
        )


class SystemClock:
    def now(self) -> float:
        return time.time()

    def steady(self) -> float:
        # All processes of a machine see the same monotonic clock, and setting the wall clock does
        # not change it.
        return time.monotonic()


@dataclass(frozen=True, slots=True)
class VirtualClock:
    """Wall time derived from Trio's clock, so that one virtual clock drives sleeps and instants."""

    epoch_s: float

    def now(self) -> float:
        return self.epoch_s + trio.current_time()

    def steady(self) -> float:
        return self.epoch_s + trio.current_time()
