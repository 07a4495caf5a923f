"""Tests OpenTelemetry with a real server and a local collector of OTLP over HTTP."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from conveyor.domain.ids import ulid_number
from tests.e2e.programs import Server, a_site, until
from tests.e2e.receiver import a_receiver

pytestmark = pytest.mark.slow
CALLERS_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@dataclass(slots=True)
class Collected:
    """The spans, metrics and services that a collector has received."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    metrics: set[str] = field(default_factory=set)
    services: set[str] = field(default_factory=set)

    def take_spans(self, body: bytes) -> None:
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            for attribute in group.resource.attributes:
                if attribute.key == "service.name":
                    self.services.add(attribute.value.string_value)
            for scope in group.scope_spans:
                self.spans += scope.spans

    def take_metrics(self, body: bytes) -> None:
        for group in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            for scope in group.scope_metrics:
                self.metrics |= {metric.name for metric in scope.metrics}

    def of_run(self, run_id: str) -> dict[str, list[Span]]:
        """Returns the spans of a run's trace, by name."""
        trace_id = ulid_number(run_id).to_bytes(16, "big")
        spans: dict[str, list[Span]] = {}
        for span in list(self.spans):
            if span.trace_id == trace_id:
                spans.setdefault(span.name, []).append(span)
        return spans


@contextmanager
def a_collector() -> Iterator[Collected]:
    collected = Collected()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/traces":
                collected.take_spans(body)
            else:
                collected.take_metrics(body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collected.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield collected
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def a_traced_server(data_dir: Path, endpoint: str, **more: str) -> Iterator[Server]:
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_METRIC_EXPORT_INTERVAL": "200",
        **more,
    }
    server = Server(data_dir, environ)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def test_one_trace_contains_the_submit_the_fetches_and_the_webhook(tmp_path: Path) -> None:
    with (
        a_collector() as collected,
        a_site() as site,
        a_receiver() as receiver,
        a_traced_server(tmp_path / "data", collected.url) as server,
    ):
        tasks = [{"url": url} for url in site.urls(30)]
        body = {"tasks": tasks, "webhook": {"url": receiver.url}}
        job = server.call("POST", "/v1/jobs", json=body).json()
        run_id = job["latest_run"]["run_id"]
        names = {"POST /v1/jobs", "run", "fetch", "deliver webhook"}
        until("every span", lambda: names <= set(collected.of_run(run_id)) or None)
        until("the metrics", lambda: "conveyor_task_outcomes" in collected.metrics or None)
        server.stop()

    spans = collected.of_run(run_id)
    (run,) = spans["run"]
    assert run.parent_span_id == b""
    others = [span for name in names - {"run"} for span in spans[name]]
    assert {span.parent_span_id for span in others} == {run.span_id}
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano for span in [run, *others])
    # Of the thirty tasks the first ten are recorded. A retry is a separate span.
    task_ids = [
        attribute.value.string_value
        for span in spans["fetch"]
        for attribute in span.attributes
        if attribute.key == "conveyor.task_id"
    ]
    assert len(set(task_ids)) == 10
    assert collected.services == {"conveyor"}
    assert {"conveyor_fetch_seconds", "conveyor_slots", "conveyor_actor_restarts"} <= (
        collected.metrics
    )


def test_a_request_with_a_trace_context_belongs_to_the_trace_of_its_caller(
    tmp_path: Path,
) -> None:
    parent = f"00-{CALLERS_TRACE}-00f067aa0ba902b7-01"
    with (
        a_collector() as collected,
        a_site() as site,
        a_traced_server(tmp_path / "data", collected.url) as server,
    ):
        body = {"tasks": [{"url": url} for url in site.urls(1)]}
        job = server.call("POST", "/v1/jobs", json=body, headers={"traceparent": parent}).json()
        run_id = job["latest_run"]["run_id"]
        until("the run", lambda: collected.of_run(run_id).get("run"))
        server.stop()

    (request,) = [span for span in collected.spans if span.name == "POST /v1/jobs"]
    assert request.trace_id.hex() == CALLERS_TRACE
    assert [link.trace_id for link in request.links] == [ulid_number(run_id).to_bytes(16, "big")]


def test_a_sampler_with_rate_zero_records_no_span(tmp_path: Path) -> None:
    with (
        a_collector() as collected,
        a_site() as site,
        a_traced_server(
            tmp_path / "data",
            collected.url,
            OTEL_TRACES_SAMPLER="parentbased_traceidratio",
            OTEL_TRACES_SAMPLER_ARG="0",
        ) as server,
    ):
        body = {"tasks": [{"url": url} for url in site.urls(1)]}
        job = server.call("POST", "/v1/jobs", json=body).json()
        until("the end", lambda: server.ended_run(job["job_id"]))
        server.stop()

    assert collected.spans == []
    assert collected.metrics


def test_an_unavailable_collector_delays_neither_run_nor_shutdown(tmp_path: Path) -> None:
    with a_site() as site, a_traced_server(tmp_path / "data", "http://127.0.0.1:9") as server:
        body = {"tasks": [{"url": url} for url in site.urls(20)]}
        job = server.call("POST", "/v1/jobs", json=body).json()
        run = until("the end", lambda: server.ended_run(job["job_id"]))
        code = server.stop()

    assert run["stats"]["completed"] == 20
    assert code == 0


def test_opentelemetry_is_not_imported_without_an_endpoint() -> None:
    program = (
        "import sys\n"
        "import conveyor.bootstrap.runtime, conveyor.api.server.app, conveyor.cli.roles\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

    assert done.stdout.strip() == b"[]"
