"""Vault: seals secrets at rest (SPEC.md 5.3)."""

from __future__ import annotations

from typing import Protocol

from conveyor.domain.errors import ConveyorError

_CHECK_PLACE = "secret check"
_CHECKED = b"conveyor"


class CannotUnseal(Exception):
    """The sealed text is not ours, was changed, or belongs to another place."""


class SecretBox(Protocol):
    """Laws:

    - What was sealed for a place opens for that place only; anything else is Unsealable.
    - The sealed text says nothing about the secret but its length.
    - Signing the same text for the same purpose gives the same signature, for nobody else.
    """

    def seal(self, secret: bytes, *, place: str) -> str: ...

    def unseal(self, sealed: str, *, place: str) -> bytes: ...

    def sign(self, text: str, *, purpose: str) -> str:
        """A short URL-safe signature (for cursors and result links)."""


class WrongSecret(ConveyorError):
    """The data was sealed with another secret than the one at hand."""


def make_check(secret_box: SecretBox) -> str:
    """A text to keep beside the data: only a vault with the same secret opens it."""
    return secret_box.seal(_CHECKED, place=_CHECK_PLACE)


def opens_check(secret_box: SecretBox, check: str) -> bool:
    """Whether the check was made by a vault with the same secret."""
    try:
        return secret_box.unseal(check, place=_CHECK_PLACE) == _CHECKED
    except CannotUnseal:
        return False
