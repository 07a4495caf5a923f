"""Settings of the log: unknown values are refused."""

from __future__ import annotations

import pytest

from conveyor.config import BadSettings, settings_from


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
