"""Telemetry: what is written, and what must never be."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from conveyor.logs import FloodFilter, JsonFormatter, TextFormatter, redact, set_up_logging
from conveyor.telemetry import make_metrics


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("got https://a.com/p?token=x y", "got https://a.com/p?*** y"),
        ("https://user:pw@a.com/", "https://***@a.com/"),
        ("https://a.com/p#frag", "https://a.com/p?***"),
        ('"http://a.com/?q=1"', '"http://a.com/?***"'),
        ("/v1/content?token=abc.def", "/v1/content?token=***"),
        ("nothing to hide", "nothing to hide"),
    ],
)
def test_urls_lose_their_queries(text: str, written: str) -> None:
    assert redact(text) == written


def _record(message: str, **fields: object) -> logging.LogRecord:
    return logging.makeLogRecord(
        {"name": "conveyor.x", "levelname": "INFO", "msg": message, "created": 0.0, **fields}
    )


def test_a_json_line_carries_its_fields_and_no_secrets() -> None:
    line = JsonFormatter().format(
        _record("fetched https://a.com/?k=v", run_id="R", api_key="secret", headers={"A": "secret"})
    )

    assert json.loads(line) == {
        "at": "1970-01-01T00:00:00.000Z",
        "level": "info",
        "logger": "conveyor.x",
        "message": "fetched https://a.com/?***",
        "run_id": "R",
        "api_key": "***",
        "headers": "***",
    }


def test_a_text_line_stays_one_line() -> None:
    line = TextFormatter().format(_record("a\nb", count=3))

    assert line == "1970-01-01T00:00:00.000Z INFO    conveyor.x: a\\nb (count=3)"


@pytest.mark.parametrize("style", ["json", "text"])
def test_a_traceback_is_written_without_queries(style: str, root: logging.Logger) -> None:
    stream = io.StringIO()
    assert style in {"json", "text"}
    set_up_logging("json" if style == "json" else "text", stream=stream)

    try:
        raise ValueError("https://a.com/?secret=1")
    except ValueError:
        logging.getLogger("x").exception("failed")

    assert "ValueError" in stream.getvalue()
    assert "secret" not in stream.getvalue()


def test_setting_up_again_does_not_write_lines_twice(root: logging.Logger) -> None:
    stream = io.StringIO()
    set_up_logging("text", stream=stream)
    set_up_logging("text", stream=stream)

    logging.getLogger("x").info("once")

    assert stream.getvalue().count("once") == 1


def test_two_sets_of_metrics_share_nothing() -> None:
    one, two = make_metrics(CollectorRegistry()), make_metrics(CollectorRegistry())

    one.task_outcomes.labels("failed", "timeout").inc()

    name, labels = "conveyor_task_outcomes_total", {"result": "failed", "reason": "timeout"}
    assert one.registry.get_sample_value(name, labels) == 1
    assert two.registry.get_sample_value(name, labels) is None


def test_equal_errors_are_limited_and_what_was_left_out_is_counted() -> None:
    now = 0.0
    flood = FloodFilter(lambda: now)
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(flood)
    handler.setFormatter(JsonFormatter())
    log = logging.Logger("flooded")
    log.addHandler(handler)

    def fail(count: int) -> None:
        for number in range(count):
            log.warning("put off", extra={"task": number})

    fail(1000)
    log.warning("something else")
    now = FloodFilter.WINDOW_S
    fail(1)

    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["message"] for line in lines] == [
        *["put off"] * FloodFilter.LINES_MAX,
        "something else",
        "put off",
    ]
    assert lines[-1]["left_out"] == 1000 - FloodFilter.LINES_MAX


def test_lines_that_tell_of_ordinary_things_are_never_left_out() -> None:
    flood = FloodFilter(lambda: 0.0)
    record = logging.LogRecord("a", logging.INFO, "file.py", 1, "request", None, None)

    assert all(flood.filter(record) for _ in range(1000))
