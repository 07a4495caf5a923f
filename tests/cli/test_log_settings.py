"""Settings of the log, and variables that are no settings."""

from __future__ import annotations

import json

import pytest

from conveyor.config import BadSettings, settings_from, unknown_settings
from tests.cli.program import Program


@pytest.mark.parametrize(
    ("name", "text"),
    [("CONVEYOR_LOG", "debug"), ("CONVEYOR_LOG_LEVEL", "loud"), ("CONVEYOR_ADMIN_KEY", "short")],
)
def test_an_unknown_value_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(BadSettings, match=name):
        settings_from({name: text})


def test_the_level_is_read_from_its_setting() -> None:
    assert settings_from({}).log_level == "info"
    assert settings_from({"CONVEYOR_LOG_LEVEL": "warning"}).log_level == "warning"


def test_a_misspelt_setting_is_told_with_the_nearest_one() -> None:
    environ = {
        "CONVEYOR_CONCURENCY": "5",
        "CONVEYOR_API_KEYS_FIEL": "keys",
        "CONVEYOR_COLOUR": "blue",
        "CONVEYOR_API_KEY": "a client's",
        "CONVEYOR_API_KEYS": "a setting of another mode",
        "CONVEYOR_PORT": "80",
        "CONVEYOR_API_SERVICE_HOST": "10.0.0.1",
        "CONVEYOR_API_PORT_80_TCP_ADDR": "10.0.0.1",
        "CONVEYOR_TEST_SEEDS": "5",
        "PATH": "/bin",
    }

    assert unknown_settings(environ) == {
        "CONVEYOR_API_KEYS_FIEL": "CONVEYOR_API_KEYS_FILE",
        "CONVEYOR_COLOUR": None,
        "CONVEYOR_CONCURENCY": "CONVEYOR_CONCURRENCY",
    }


def test_a_command_names_a_variable_that_is_no_setting(program: Program) -> None:
    ended = program.run("scrape", CONVEYOR_ALLOW_PRIVATE_TARGET="1")

    assert ended.err.startswith(
        "Warning: CONVEYOR_ALLOW_PRIVATE_TARGET is no setting. "
        "Did you mean CONVEYOR_ALLOW_PRIVATE_TARGETS?\n"
    )


def test_a_server_logs_a_variable_that_is_no_setting(program: Program) -> None:
    ended = program.run("worker", CONVEYOR_LOG_LEVLE="debug", CONVEYOR_DATA_DIR="none")

    line = json.loads(ended.err.splitlines()[0])
    assert (line["level"], line["message"]) == ("warning", "no setting has this name")
    assert (line["variable"], line["nearest"]) == ("CONVEYOR_LOG_LEVLE", "CONVEYOR_LOG_LEVEL")
