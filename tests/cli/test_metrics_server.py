"""What a worker shows of itself over HTTP: metrics and health, and nothing else."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import trio
from prometheus_client import CollectorRegistry

from conveyor import __version__
from conveyor.engines.aws.client.usage import Meter
from conveyor.metrics_server import Monitor
from conveyor.telemetry import EngineUsage, Metrics, make_metrics

HEALTH = f'{{"status":"ok","version":"{__version__}","build":"unknown"}}'


@asynccontextmanager
async def shown(metrics: Metrics, caplog: pytest.LogCaptureFixture) -> AsyncGenerator[int, None]:
    """The port on which these metrics are shown."""
    caplog.set_level(logging.INFO, "conveyor.metrics_server")
    async with trio.open_nursery() as nursery:
        await nursery.start(Monitor(metrics=metrics, host="127.0.0.1", port=0).run)
        (record,) = caplog.records
        match = re.search(r":(\d+)/metrics", vars(record)["url"])
        assert match is not None
        yield int(match.group(1))
        nursery.cancel_scope.cancel()


async def asked(port: int, request: bytes) -> tuple[str, str]:
    """The status line and the body of what is answered."""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(request)
        answer = b"".join([piece async for piece in stream])
    head, _, body = answer.decode().partition("\r\n\r\n")
    return head.splitlines()[0], body


@pytest.mark.parametrize(
    ("request_line", "status", "body"),
    [
        (b"GET /healthz HTTP/1.1", "200 OK", HEALTH),
        (b"GET /readyz HTTP/1.1", "200 OK", '{"status":"ready"}'),
        (b"HEAD /healthz HTTP/1.1", "200 OK", ""),
        (b"GET /v1/jobs HTTP/1.1", "404 Not Found", "not here\n"),
        (b"POST /metrics HTTP/1.1", "400 Bad Request", "not understood\n"),
        (b"\x16\x03\x01", "400 Bad Request", "not understood\n"),
    ],
)
async def test_there_is_health_and_nothing_for_callers(
    request_line: bytes, status: str, body: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with shown(make_metrics(CollectorRegistry()), caplog) as port:
        answer = await asked(port, request_line + b"\r\nHost: x\r\n\r\n")

    assert answer == (f"HTTP/1.1 {status}", body)


async def test_metrics_tell_what_the_engine_was_asked(caplog: pytest.LogCaptureFixture) -> None:
    metrics, meter = make_metrics(CollectorRegistry()), Meter()
    metrics.registry.register(EngineUsage(meter, {"found": 3}))
    metrics.task_outcomes.labels("successful", "").inc(3)
    meter.count("dynamodb", "PutItem", {"Item": {"pk": {"S": "x"}}}, {})
    meter.count_redis("renew")
    meter.rows_read, meter.rows_returned = 5, 4

    async with shown(metrics, caplog) as port:
        _, body = await asked(port, b"GET /metrics HTTP/1.1\r\n\r\n")

    assert {
        'conveyor_task_outcomes_total{reason="",result="successful"} 3.0',
        'conveyor_engine_calls_total{call="dynamodb.PutItem"} 1.0',
        'conveyor_engine_calls_total{call="redis.renew"} 1.0',
        'conveyor_engine_capacity_units_total{kind="write"} 1.0',
        'conveyor_engine_rows_total{kind="read"} 5.0',
        'conveyor_engine_cache_looks_total{outcome="found"} 3.0',
        'conveyor_engine_rows_total{kind="returned"} 4.0',
        "conveyor_engine_list_price_dollars_total 6.25e-07",
    } <= set(body.splitlines())


async def test_who_says_nothing_or_too_much_keeps_nobody_waiting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        shown(make_metrics(CollectorRegistry()), caplog) as port,
        await trio.open_tcp_stream("127.0.0.1", port),
    ):
        answer = await asked(port, b"GET /" + b"x" * 100_000)

    assert answer[0] == "HTTP/1.1 400 Bad Request"
