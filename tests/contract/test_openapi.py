"""The project's own OpenAPI document against a real server: schemathesis, with all its checks and
its stateful phase. CONVEYOR_TEST_EXAMPLES is the maximum of cases per operation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.programs import Server
from tests.e2e.test_gateway import a_gateway

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent / "schemathesis"
KEY = "schemathesis"
DEADLINE_S = 1200


def test_the_server_does_what_its_openapi_document_says(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n")
    auth = {"CONVEYOR_AUTH": "keys", "CONVEYOR_API_KEYS_FILE": str(keys)}
    # A fast machine sends more requests than the default rate limit allows.
    auth["CONVEYOR_QUOTA_REQUESTS_PER_S"] = "off"
    with a_gateway() as (gateway, _):
        server = Server(tmp_path / "data", {**auth, "CONVEYOR_GATEWAY_URL": gateway})
        server.start()
        try:
            result = _examine(server.url)
        finally:
            server.kill()

    assert result.returncode == 0, result.stdout[-12_000:]


def _examine(url: str) -> subprocess.CompletedProcess[str]:
    examples = os.environ.get("CONVEYOR_TEST_EXAMPLES", "2")
    seed = ["--seed", "1"] if os.environ.get("CI") else []
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(HERE / "config.toml")]
    options = ["--max-examples", examples, "--header", f"X-API-Key: {KEY}", "--no-color", *seed]
    return subprocess.run(
        [*command, "run", f"{url}/openapi.json", *options],
        env={**os.environ, "SCHEMATHESIS_HOOKS": str(HERE / "hooks.py")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
