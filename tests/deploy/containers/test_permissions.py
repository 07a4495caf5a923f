"""Tests that `conveyor check` and the log of the process report a missing permission.

Two actions of each role are removed here. `CONVEYOR_TEST_PERMISSIONS=all` removes all of them, as
`python -m tests.deploy.containers.permissions` does for the table of docs/deploy.md.
"""

from __future__ import annotations

import os

import httpx
import pytest

from conveyor.cli.demo import Site
from tests.deploy.containers.permissions import remove
from tests.deploy.containers.stage import Stage
from tests.deploy.containers.uses import USES, Caller

ALL = [(role, action) for role, uses in USES.items() for action in uses]
SAMPLE = [
    ("api", "sqs:GetQueueUrl"),
    ("api", "s3:PutObject"),
    ("worker", "dynamodb:UpdateItem"),
    ("worker", "sqs:SendMessage"),
]


@pytest.mark.parametrize(
    ("role", "action"), ALL if os.environ.get("CONVEYOR_TEST_PERMISSIONS") == "all" else SAMPLE
)
def test_a_missing_permission_is_reported_by_the_check_and_in_the_log(
    stage: Stage, url: str, site: Site, role: str, action: str
) -> None:
    headers = {"X-API-Key": stage.key}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as http:
        removal = remove(stage, Caller(stage, http, site), role, action)

    assert removal.is_named_by_the_check, removal.check
    assert removal.is_named_in_the_log
