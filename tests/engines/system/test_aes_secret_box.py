"""AesSecretBox: encryption, signatures, and how its secret is stored."""

from __future__ import annotations

import stat
import string
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.engines.system import AesSecretBox, load_or_create_secret
from conveyor.ports.secret_box import CannotUnseal, SecretBox

BOX: SecretBox = AesSecretBox(b"k" * 32)
OTHER_BOX: SecretBox = AesSecretBox(b"l" * 32)


@given(secret=st.binary(max_size=200), place=st.text(max_size=40))
def test_a_sealed_text_can_be_opened_for_its_place(secret: bytes, place: str) -> None:
    sealed = BOX.seal(secret, place=place)

    assert BOX.unseal(sealed, place=place) == secret


def test_a_sealed_text_cannot_be_opened_for_another_place() -> None:
    sealed = BOX.seal(b"secret", place="job/1/auth")

    with pytest.raises(CannotUnseal):
        BOX.unseal(sealed, place="job/2/auth")


def test_a_sealed_text_cannot_be_opened_with_another_secret() -> None:
    sealed = BOX.seal(b"secret", place="here")

    with pytest.raises(CannotUnseal):
        OTHER_BOX.unseal(sealed, place="here")


@given(data=st.data())
def test_a_sealed_text_with_any_changed_character_cannot_be_opened(data: st.DataObject) -> None:
    sealed = BOX.seal(b"secret", place="here")
    index = data.draw(st.integers(0, len(sealed) - 1))
    letter = data.draw(
        st.sampled_from(string.printable).filter(lambda character: character != sealed[index])
    )

    with pytest.raises(CannotUnseal):
        BOX.unseal(sealed[:index] + letter + sealed[index + 1 :], place="here")


@given(text=st.text(max_size=80))
def test_text_that_was_not_sealed_cannot_be_opened(text: str) -> None:
    for candidate in (text, f"v1.{text}"):
        with pytest.raises(CannotUnseal):
            BOX.unseal(candidate, place="here")


@pytest.mark.parametrize("extra", ["=", "\n", " ", "A", "v1."])
def test_a_sealed_text_has_one_valid_spelling(extra: str) -> None:
    sealed = BOX.seal(b"secrets", place="here")

    for candidate in (sealed + extra, extra + sealed, sealed.replace("v1.", f"v1.{extra}")):
        with pytest.raises(CannotUnseal):
            BOX.unseal(candidate, place="here")


def test_a_truncated_sealed_text_cannot_be_opened() -> None:
    sealed = BOX.seal(b"secret", place="here")

    for length in range(len(sealed)):
        with pytest.raises(CannotUnseal):
            BOX.unseal(sealed[:length], place="here")


def test_sealing_the_same_secret_twice_gives_different_texts_of_the_same_length() -> None:
    first, second = (BOX.seal(b"secret", place="here") for _ in range(2))

    assert first != second
    assert len(first) == len(second)
    assert first.startswith("v1.")
    assert "secret" not in first


def test_the_nonce_comes_from_the_given_callable() -> None:
    fixed = AesSecretBox(b"k" * 32, nonce=bytes)

    assert fixed.seal(b"secret", place="here") == fixed.seal(b"secret", place="here")


def test_a_signature_depends_on_text_and_purpose_only() -> None:
    signature = BOX.sign("text", purpose="cursor")

    assert BOX.sign("text", purpose="cursor") == signature
    others = [
        BOX.sign("text ", purpose="cursor"),
        BOX.sign("text", purpose="result"),
        BOX.sign("rtext", purpose="curso"),
        BOX.sign("cursor", purpose="text"),
        OTHER_BOX.sign("text", purpose="cursor"),
    ]
    assert len({signature, *others}) == 6


@given(text=st.text(max_size=40), purpose=st.text(max_size=20))
def test_a_signature_is_short_and_url_safe_and_hard_to_guess(text: str, purpose: str) -> None:
    signature = BOX.sign(text, purpose=purpose)

    assert len(signature) == 24
    assert set(signature) <= set(string.ascii_letters + string.digits + "-_")


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        AesSecretBox(b"k" * 31)


def test_the_first_start_creates_the_secret_and_later_ones_read_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "secret"

    first, second = load_or_create_secret(path), load_or_create_secret(path)

    assert first == second
    assert len(first) == 32
    assert [file.name for file in path.parent.iterdir()] == ["secret"]


def test_only_the_owner_may_read_the_secret(tmp_path: Path) -> None:
    path = tmp_path / "secret"

    load_or_create_secret(path)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_concurrent_first_starts_get_the_same_secret(tmp_path: Path) -> None:
    path = tmp_path / "secret"

    with ThreadPoolExecutor(16) as pool:
        secrets = set(pool.map(lambda _: load_or_create_secret(path), range(64)))

    assert len(secrets) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["secret"]


def test_two_files_hold_different_secrets(tmp_path: Path) -> None:
    assert load_or_create_secret(tmp_path / "a") != load_or_create_secret(tmp_path / "b")


@pytest.mark.parametrize("text", ["", "abcd\n", "not hex at all"])
def test_a_file_without_a_valid_secret_is_refused_and_not_changed(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "secret"
    path.write_text(text)

    with pytest.raises(ValueError, match=r"secret|hex"):
        load_or_create_secret(path)
    assert path.read_text() == text
