"""SecretBox: seals secrets at rest, and signs cursors and links (SPEC.md 5.3)."""

from __future__ import annotations

from typing import Protocol

from conveyor.domain.errors import ConveyorError

# If either value changes, the checks of all existing data fail as if the secret were wrong.
_CHECK_PLACE = "secret check"
_CHECKED = b"conveyor"


class CannotUnseal(Exception):
    """The sealed text was not made by this secret, was changed, or belongs to another place."""


class SecretBox(Protocol):
    """Laws:

    - A secret that was sealed for a place can be unsealed for that place only; anything else raises
      CannotUnseal.
    - The sealed text reveals only the length of the secret.
    - The same text and purpose give the same signature; without the secret it cannot be made.
    """

    def seal(self, secret: bytes, *, place: str) -> str: ...

    def unseal(self, sealed: str, *, place: str) -> bytes: ...

    def sign(self, text: str, *, purpose: str) -> str:
        """Returns a short URL-safe signature (for cursors and result links)."""


class WrongSecret(ConveyorError):
    """The data was sealed with another secret than the configured one."""


def make_check(secret_box: SecretBox) -> str:
    """Returns a text to store beside the data. Only a secret box with the same secret can unseal
    it."""
    return secret_box.seal(_CHECKED, place=_CHECK_PLACE)


def opens_check(secret_box: SecretBox, check: str) -> bool:
    """Returns whether the check was made with the same secret."""
    try:
        return secret_box.unseal(check, place=_CHECK_PLACE) == _CHECKED
    except CannotUnseal:
        return False
