"""A start with a secret other than the one that encrypted the data is refused."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from conveyor.engines.system import AesSecretBox, check_secret, refuse_lost_secret
from conveyor.ports.secret_box import WrongSecret, make_check, opens_check

OURS, OTHER = AesSecretBox(b"a" * 32), AesSecretBox(b"b" * 32)


def test_the_same_secret_is_accepted_again(tmp_path: Path) -> None:
    check_secret(tmp_path, OURS)

    check_secret(tmp_path, AesSecretBox(b"a" * 32))

    assert [path.name for path in tmp_path.iterdir()] == ["secret.check"]
    assert stat.S_IMODE((tmp_path / "secret.check").stat().st_mode) == 0o600


def test_another_secret_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    check_secret(tmp_path, OURS)
    before = (tmp_path / "secret.check").read_bytes()

    with pytest.raises(WrongSecret, match="CONVEYOR_SECRET_KEY"):
        check_secret(tmp_path, OTHER)

    assert (tmp_path / "secret.check").read_bytes() == before
    check_secret(tmp_path, OURS)


def test_a_changed_check_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret.check").write_bytes(b"\xff not ours")

    with pytest.raises(WrongSecret):
        check_secret(tmp_path, OURS)


def test_a_check_can_be_opened_with_its_own_secret_only() -> None:
    check = make_check(OURS)

    assert opens_check(OURS, check)
    assert not opens_check(OTHER, check)
    assert not opens_check(OURS, OURS.seal(b"conveyor", place="elsewhere"))


def test_a_lost_secret_is_not_created_again(tmp_path: Path) -> None:
    refuse_lost_secret(tmp_path)
    check_secret(tmp_path, OURS)

    with pytest.raises(WrongSecret, match="missing"):
        refuse_lost_secret(tmp_path)

    (tmp_path / "secret.key").write_text("00" * 32)
    refuse_lost_secret(tmp_path)
