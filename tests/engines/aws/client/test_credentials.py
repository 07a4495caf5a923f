"""Credentials, region and endpoints are found as botocore finds them, and credentials are renewed
in time."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trio
import trio.testing
from botocore.credentials import RefreshableCredentials
from botocore.exceptions import ClientError, CredentialRetrievalError
from trio.testing import MockClock

from conveyor.engines.aws.client.auth import CHECK_EVERY_S, ResolvedAccess, find_access
from conveyor.engines.aws.errors import NoResponse
from conveyor.engines.aws_signature import Credentials


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """An environment without the AWS settings of this machine."""
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

    access = await find_access(time.time)

    assert access.region == "eu-west-1"
    assert await access.credentials() == Credentials("AKIA", "secret", "token")
    assert (await access.endpoint("dynamodb")).url == "http://127.0.0.1:1000/"
    assert (await access.endpoint("sqs")).url == "http://127.0.0.1:2000/"


@pytest.mark.slow
async def test_without_a_setting_the_default_endpoint_of_the_region_is_used(
    environment: pytest.MonkeyPatch,
) -> None:
    access = await find_access(time.time, "us-west-2")

    assert (await access.endpoint("s3")).url == "https://s3.us-west-2.amazonaws.com/"
    assert access.region == "us-west-2"


@pytest.mark.slow
async def test_without_credentials_nothing_can_be_signed(environment: pytest.MonkeyPatch) -> None:
    environment.delenv("AWS_ACCESS_KEY_ID")

    with pytest.raises(NoResponse):
        await find_access(time.time)


class Rotating:
    """A source that returns new credentials at every call."""

    def __init__(self) -> None:
        self.asked = 0

    def get_frozen_credentials(self) -> Frozen:
        self.asked += 1
        return Frozen(self.asked)


class Frozen:
    def __init__(self, number: int) -> None:
        self.access_key, self.secret_key, self.token = f"key-{number}", "secret", None


class Slow:
    """A source that answers when the test allows it."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()

    def get_frozen_credentials(self) -> Frozen:
        self.may_answer.wait(10)
        return Frozen(1)


class Failing:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def get_frozen_credentials(self) -> Frozen:
        raise self.error


OLD = Credentials("old", "old")
EXPIRED = Credentials("old", "old", expires_at=1.0)


async def test_concurrent_requests_without_valid_credentials_share_one_renewal() -> None:
    source = Rotating()
    access = ResolvedAccess(None, "us-east-1", source, EXPIRED, time.time)
    seen: list[str] = []

    async def ask() -> None:
        seen.append((await access.credentials()).access_key)

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(ask)

    assert seen == ["key-1"] * 10
    assert source.asked == 1


async def test_no_request_waits_for_a_renewal_while_the_credentials_are_valid() -> None:
    source = Slow()
    access = ResolvedAccess(None, "us-east-1", source, OLD, time.time)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(access.credentials)
        await trio.testing.wait_all_tasks_blocked()
        meanwhile = await access.credentials()
        source.may_answer.set()

    assert meanwhile == OLD
    assert (await access.credentials()).access_key == "key-1"


@pytest.mark.parametrize(
    "error",
    [
        ClientError({"Error": {"Code": "ExpiredToken"}}, "AssumeRole"),
        CredentialRetrievalError(provider="ecs", error_msg="no"),
        RuntimeError(
            "Credentials were refreshed, but the refreshed credentials are still expired."
        ),
    ],
)
async def test_credentials_that_cannot_be_renewed_are_used_while_they_are_valid(
    error: Exception,
) -> None:
    good = ResolvedAccess(None, "us-east-1", Failing(error), OLD, time.time)
    expired = ResolvedAccess(None, "us-east-1", Failing(error), EXPIRED, time.time)

    assert await good.credentials() == OLD
    with pytest.raises(NoResponse):
        await expired.credentials()


async def test_renewed_credentials_are_used_after_the_check_interval(mock_clock: MockClock) -> None:
    access = ResolvedAccess(None, "us-east-1", Rotating(), OLD, time.time)

    first = await access.credentials()
    again = await access.credentials()
    mock_clock.jump(CHECK_EVERY_S)
    later = await access.credentials()

    assert (first.access_key, again.access_key, later.access_key) == ("key-1", "key-1", "key-2")


async def test_renewed_credentials_include_their_expiry() -> None:
    ends = datetime.now(UTC) + timedelta(hours=2)
    source = RefreshableCredentials("key", "secret", "token", ends, dict, "test")
    access = ResolvedAccess(None, "us-east-1", source, OLD, time.time)

    keys = await access.credentials()

    assert keys == Credentials("key", "secret", "token", ends.timestamp())
