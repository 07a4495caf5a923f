"""Keys, region and endpoints are found as botocore finds them, and keys are renewed in time."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from conveyor.engines.aws.credentials import CHECK_EVERY_S, FoundAccess, find_access
from conveyor.engines.aws.errors import NoAnswer
from conveyor.engines.aws.signing import Credentials


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Nothing of the machine's own."""
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_SQS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    return monkeypatch


@pytest.mark.slow
async def test_keys_region_and_endpoints_come_from_the_environment(
    environment: pytest.MonkeyPatch,
) -> None:
    environment.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1000")
    environment.setenv("AWS_ENDPOINT_URL_SQS", "http://127.0.0.1:2000")

    access = await find_access()

    assert access.region == "eu-west-1"
    assert await access.credentials() == Credentials("AKIA", "secret", "token")
    assert (await access.endpoint("dynamodb")).url == "http://127.0.0.1:1000/"
    assert (await access.endpoint("sqs")).url == "http://127.0.0.1:2000/"


@pytest.mark.slow
async def test_without_a_setting_the_endpoint_is_the_regions_own(
    environment: pytest.MonkeyPatch,
) -> None:
    access = await find_access("us-west-2")

    assert (await access.endpoint("s3")).url == "https://s3.us-west-2.amazonaws.com/"
    assert access.region == "us-west-2"


@pytest.mark.slow
async def test_without_any_keys_nothing_can_be_signed(environment: pytest.MonkeyPatch) -> None:
    environment.delenv("AWS_ACCESS_KEY_ID")

    with pytest.raises(NoAnswer):
        await find_access()


class Rotating:
    """A source whose keys are new whenever it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def get_frozen_credentials(self) -> Frozen:
        self.asked += 1
        return Frozen(self.asked)


class Frozen:
    def __init__(self, number: int) -> None:
        self.access_key, self.secret_key, self.token = f"key-{number}", "secret", None


async def test_whoever_asks_at_once_shares_one_renewal() -> None:
    source = Rotating()
    access = FoundAccess(None, "us-east-1", source, Credentials("old", "old"))
    seen: list[str] = []

    async def ask() -> None:
        seen.append((await access.credentials()).access_key)

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(ask)

    assert seen == ["key-1"] * 10
    assert source.asked == 1


async def test_renewed_keys_are_seen_after_a_moment(mock_clock: MockClock) -> None:
    access = FoundAccess(None, "us-east-1", Rotating(), Credentials("old", "old"))

    first = await access.credentials()
    again = await access.credentials()
    mock_clock.jump(CHECK_EVERY_S)
    later = await access.credentials()

    assert (first.access_key, again.access_key, later.access_key) == ("key-1", "key-1", "key-2")
