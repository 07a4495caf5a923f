"""Keys of a container, of a machine and of a profile: botocore asks stand-ins of the services that
hand them out, over real sockets."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from trio.testing import MockClock

from conveyor.engines.aws.client.auth import CHECK_EVERY_S, find_access
from conveyor.engines.aws.errors import NoResponse
from conveyor.engines.aws_signature import Credentials

pytestmark = pytest.mark.slow

ROLE = "the-role"
METADATA = "/latest/meta-data/iam/security-credentials/"
RENEWED_AHEAD_S = 15 * 60  # botocore's own margin.


class Office(ThreadingHTTPServer):
    """Hands out other keys whenever it is asked, good for `lives_s`; none while it is closed."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Clerk)
        self.lives_s = 3600.0
        self.is_closed = False
        self.handed_out = 0
        self.bearers: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def keys(self) -> dict[str, str]:
        self.handed_out += 1
        until = datetime.now(UTC) + timedelta(seconds=self.lives_s)
        return {
            "Code": "Success",
            "AccessKeyId": f"key-{self.handed_out}",
            "SecretAccessKey": "secret",
            "Token": "token",
            "Expiration": until.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }


class _Clerk(BaseHTTPRequestHandler):
    server: Office

    def do_PUT(self) -> None:
        """The second version of the metadata service: a token first."""
        self._say(b"a-session")

    def do_GET(self) -> None:
        self.server.bearers.append(self.headers.get("Authorization"))
        if self.path == METADATA:
            self._say(ROLE.encode())
        else:
            self._say(json.dumps(self.server.keys()).encode())

    def _say(self, body: bytes) -> None:
        self.send_response(503 if self.server.is_closed else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def an_office() -> Iterator[Office]:
    with Office() as office:
        thread = threading.Thread(target=office.serve_forever)
        thread.start()
        try:
            yield office
        finally:
            office.shutdown()
            thread.join()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Nothing of the machine's own, and no keys."""
    for name in ("PROFILE", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_METADATA_SERVICE_NUM_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    return monkeypatch


@pytest.fixture
def office() -> Iterator[Office]:
    with an_office() as office:
        yield office


@pytest.fixture
def container(environment: pytest.MonkeyPatch, office: Office) -> Office:
    """As a task on Fargate is told where its role's keys are."""
    environment.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{office.url}/keys")
    environment.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "a-bearer")
    return office


async def test_a_container_has_the_keys_of_its_role(container: Office) -> None:
    began_at = time.time()
    access = await find_access(time.time)

    keys = await access.credentials()

    assert (keys.access_key, keys.secret_key, keys.token) == ("key-1", "secret", "token")
    assert keys.expires_at == pytest.approx(began_at + container.lives_s, abs=30)
    assert set(container.bearers) == {"a-bearer"}


async def test_keys_of_a_container_are_asked_for_again_before_they_end(
    container: Office, mock_clock: MockClock
) -> None:
    container.lives_s = RENEWED_AHEAD_S - 60
    access = await find_access(time.time)
    first = await access.credentials()

    mock_clock.jump(CHECK_EVERY_S)
    later = await access.credentials()

    assert later.access_key != first.access_key


async def test_a_role_whose_service_is_away_goes_on_with_good_keys(
    container: Office, mock_clock: MockClock
) -> None:
    container.lives_s = RENEWED_AHEAD_S - 60
    access = await find_access(time.time)
    first = await access.credentials()

    container.is_closed = True
    mock_clock.jump(CHECK_EVERY_S)

    assert await access.credentials() == first


async def test_without_a_service_there_are_no_keys_to_begin_with(container: Office) -> None:
    container.is_closed = True

    with pytest.raises(NoResponse):
        await find_access(time.time)


async def test_a_machine_has_the_keys_of_its_role(
    environment: pytest.MonkeyPatch, office: Office
) -> None:
    environment.setenv("AWS_EC2_METADATA_DISABLED", "false")
    environment.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"{office.url}/")

    access = await find_access(time.time)

    assert (await access.credentials()).access_key == f"key-{office.handed_out}"


async def test_a_profile_has_its_keys_and_its_region(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.delenv("AWS_DEFAULT_REGION")
    environment.setenv("AWS_PROFILE", "batch")
    (tmp_path / "config").write_text("[profile batch]\nregion = ap-south-1\n")
    (tmp_path / "credentials").write_text(
        "[batch]\naws_access_key_id = AKIA\naws_secret_access_key = secret\n"
    )

    access = await find_access(time.time)

    assert access.region == "ap-south-1"
    assert await access.credentials() == Credentials("AKIA", "secret")
