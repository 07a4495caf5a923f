"""Roles that need a shared engine, and what they say where there is none
(docs/operations.md, Roles)."""

from __future__ import annotations

import re
import signal
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cli.program import PATIENCE_S, Program, finish
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


POSTGRES = {
    "CONVEYOR_ENGINE": "postgres",
    "CONVEYOR_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none",
    "CONVEYOR_BLOB_DIR": "bodies",
    "CONVEYOR_SECRET_KEY": "of many characters",
}


@pytest.mark.parametrize("name", [name for name in POSTGRES if name != "CONVEYOR_ENGINE"])
def test_the_postgres_engine_says_what_it_lacks(program: Program, name: str) -> None:
    ended = program.run("worker", **{**POSTGRES, name: ""})

    assert_refused(ended, name, "must be given")


@pytest.mark.parametrize("role", ["init", "api", "worker", "ps"])
def test_a_password_in_a_url_that_cannot_be_read_is_not_shown(program: Program, role: str) -> None:
    url = "mysql://me:hunter2@127.0.0.1:1/none"

    ended = program.run(role, **{**POSTGRES, "CONVEYOR_DATABASE_URL": url})

    assert_refused(ended, "CONVEYOR_DATABASE_URL", "postgresql://")
    assert "hunter2" not in ended.err


def test_a_database_that_is_away_is_a_case_for_the_check(program: Program) -> None:
    assert_refused(program.run("worker", **POSTGRES), "Connection refused", "`conveyor check`")


def test_the_postgres_engine_keeps_bodies_in_one_place(program: Program) -> None:
    ended = program.run("worker", **POSTGRES, CONVEYOR_BUCKET="bodies")

    assert_refused(ended, "CONVEYOR_BUCKET", "not both")


def test_more_processes_on_the_aws_engine_are_more_workers(program: Program) -> None:
    ended = program.run("dev", "--processes", "2", **AWS, CONVEYOR_PORT="0")

    assert_refused(ended, "conveyor worker")


def test_the_bare_program_takes_its_role_from_the_environment(program: Program) -> None:
    assert_refused(program.run(CONVEYOR_ROLE="api"), "CONVEYOR_ENGINE=aws")


def test_dev_listens_where_its_options_say(program: Program) -> None:
    with _taken_port() as port:
        options = ("--host", "127.0.0.2", "--port", "0")
        with program.start("dev", *options, CONVEYOR_HOST="127.0.0.1", CONVEYOR_PORT=port) as dev:
            assert dev.stderr is not None
            match = re.search(r"listening on (http://\S+)", dev.stderr.readline())
            assert match is not None
            with urllib.request.urlopen(f"{match[1]}/healthz", timeout=PATIENCE_S) as response:
                status = response.status
            dev.send_signal(signal.SIGTERM)
            ended = finish(dev)

    assert match[1].startswith("http://127.0.0.2:")
    assert (status, ended.code) == (200, 0)


@pytest.mark.parametrize(("role", "settings"), [("dev", {}), ("api", AWS)])
def test_an_address_that_is_taken_is_refused_by_name(
    program: Program, role: str, settings: dict[str, str]
) -> None:
    with _taken_port("127.0.0.2") as port:
        ended = program.run(role, "--host", "127.0.0.2", "--port", port, **settings)

    assert_refused(ended, f"Cannot listen on 127.0.0.2:{port}")


@contextmanager
def _taken_port(host: str = "127.0.0.1") -> Iterator[str]:
    with socket.create_server((host, 0)) as server:
        yield str(server.getsockname()[1])
