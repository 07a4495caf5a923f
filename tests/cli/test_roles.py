"""Roles that need a shared engine, and what they say where there is none
(docs/operations.md, Roles)."""

from __future__ import annotations

import pytest

from tests.cli.program import Program
from tests.cli.test_bad_input import assert_refused

AWS = {
    "CONVEYOR_ENGINE": "aws",
    "CONVEYOR_TABLE": "table",
    "CONVEYOR_BUCKET": "bucket",
    "CONVEYOR_SECRET_KEY": "secret",
}


@pytest.mark.parametrize("role", ["api", "init"])
def test_an_embedded_engine_has_no_such_role(program: Program, role: str) -> None:
    assert_refused(program.run(role), "CONVEYOR_ENGINE=aws")


@pytest.mark.parametrize("name", ["CONVEYOR_TABLE", "CONVEYOR_BUCKET", "CONVEYOR_SECRET_KEY"])
def test_the_aws_engine_says_what_it_lacks(program: Program, name: str) -> None:
    ended = program.run("worker", **{**AWS, name: ""})

    assert_refused(ended, name, "must be given")


def test_more_processes_on_the_aws_engine_are_more_workers(program: Program) -> None:
    ended = program.run("dev", "--processes", "2", **AWS, CONVEYOR_PORT="0")

    assert_refused(ended, "conveyor worker")


def test_the_bare_program_takes_its_role_from_the_environment(program: Program) -> None:
    assert_refused(program.run(CONVEYOR_ROLE="api"), "CONVEYOR_ENGINE=aws")
