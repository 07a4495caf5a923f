"""The file of API keys changes while the server runs: who is let in, and whose links work."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from conveyor.api.server.app import make_app
from conveyor.api.server.auth import KEYS_CHECK_S, KeyList, WatchedKeys
from conveyor.config import BadSettings, KeyFile
from conveyor.domain.errors import Unauthenticated
from tests.api.world import ANNA, SECRET, World


class Now:
    """Seconds that the test moves on."""

    at_s = 0.0

    def __call__(self) -> float:
        return self.at_s

    def advance(self) -> None:
        self.at_s += KEYS_CHECK_S


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("anna\nberta\n")
    return path


@pytest.fixture
def keys(path: Path, now: Now) -> WatchedKeys:
    return WatchedKeys(KeyFile(path), secret=SECRET, now_s=now)


def _is_let_in(keys: WatchedKeys, key: str) -> bool:
    try:
        keys.identify(key)
    except Unauthenticated:
        return False
    return True


def test_a_key_is_let_in_and_another_out_once_the_file_says_so(
    keys: WatchedKeys, path: Path, now: Now
) -> None:
    path.write_text("berta\ncarla\n")
    before = [_is_let_in(keys, key) for key in ("anna", "berta", "carla")]

    now.advance()

    assert before == [True, True, False]
    assert [_is_let_in(keys, key) for key in ("anna", "berta", "carla")] == [False, True, True]


def test_a_file_that_another_took_the_place_of_is_read_again(
    keys: WatchedKeys, path: Path, now: Now
) -> None:
    """Of the same length and time, as a tool that keeps times leaves it."""
    replacement = path.with_name("new")
    replacement.write_text("carla\nbert\n"[: path.stat().st_size])
    os.utime(replacement, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    replacement.replace(path)

    now.advance()

    assert [_is_let_in(keys, key) for key in ("anna", "carla")] == [False, True]


@pytest.mark.parametrize("content", [None, b"", b"# no key\n\n", b"\xff\xfe"])
def test_a_file_without_keys_changes_nothing_and_is_told_of_once(
    keys: WatchedKeys,
    path: Path,
    now: Now,
    caplog: pytest.LogCaptureFixture,
    content: bytes | None,
) -> None:
    path.unlink()
    if content is not None:
        path.write_bytes(content)

    for _ in range(3):
        now.advance()
        assert _is_let_in(keys, "anna")

    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.message for record in errors] == [
        "API keys not reloaded: the previous ones stay in force"
    ]
    path.write_text("carla\n")
    now.advance()
    assert [_is_let_in(keys, key) for key in ("anna", "carla")] == [False, True]


def test_the_file_is_looked_at_once_a_second_at_most(path: Path, now: Now) -> None:
    looks = 0

    class Counted(KeyFile):
        def stamp(self) -> object:
            nonlocal looks
            looks += 1
            return super().stamp()

    keys = WatchedKeys(Counted(path), secret=SECRET, now_s=now)
    for _ in range(100):
        keys.identify("anna")
    now.advance()
    for _ in range(100):
        keys.identify("anna")

    assert looks == 2


def test_lines_with_blanks_before_a_remark_are_no_keys(path: Path) -> None:
    path.write_text("  # remark\n  anna  \n")

    assert KeyFile(path).load() == frozenset({"anna"})


def test_a_file_that_cannot_be_read_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="CONVEYOR_API_KEYS_FILE"):
        WatchedKeys(KeyFile(tmp_path / "none"), secret=SECRET, now_s=Now())


def test_no_key_is_compared_but_by_its_digest_in_constant_time() -> None:
    keys = KeyList.of(["anna", "berta"], secret=SECRET)

    assert all(len(digest) == 32 for digest in keys.digests)
    assert not any(b"anna" in digest for digest in keys.digests)


async def test_links_end_with_the_key_of_their_caller(world: World, path: Path, now: Now) -> None:
    path.write_text(f"{ANNA}\n")
    world.app = make_app(
        world.env,
        WatchedKeys(KeyFile(path), secret=SECRET, now_s=now),
        notifier=world.receiver,
        metrics=world.metrics,
        ready=lambda: True,
    )
    job = await world.submit(1)
    await world.finish(job)
    (row,) = (await world.get(f"/v1/jobs/{job['job_id']}/results")).json["results"]
    link = "/v1/" + row["result_url"].partition("/v1/")[2]
    slot = (await world.post("/v1/job_inputs", {"format": "text"})).json
    upload = "/v1/" + slot["upload"]["url"].partition("/v1/")[2]
    before = (await world.get(link, key=None)).status

    path.write_text("another key\n")
    now.advance()

    assert before == 200
    assert (await world.get(link, key=None)).status == 404
    refused = await world.call(
        "PUT", upload, raw=b"x", key=None, headers={"Content-Type": "text/plain"}
    )
    assert refused.status == 404
