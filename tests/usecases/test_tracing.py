"""Which spans a process records, and to which run a request belongs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from conveyor.config import otlp_settings_from
from conveyor.domain.ids import ulid_number
from conveyor.ports.tracer import SpanRecord
from conveyor.usecases.tracing import begin_request, is_traced_fetch
from tests.api.world import World, make_world


@dataclass(slots=True)
class RecordingTracer:
    spans: list[SpanRecord] = field(default_factory=list)

    def record(self, span: SpanRecord) -> None:
        self.spans.append(span)


def make_traced_world() -> tuple[World, RecordingTracer]:
    world, tracer = make_world(), RecordingTracer()
    env = replace(world.env, tracer=tracer)
    return replace(world.seen_through(env), env=env), tracer


async def test_a_request_and_the_run_that_it_created_have_one_trace() -> None:
    world, tracer = make_traced_world()

    job = await world.submit(2)
    await world.finish(job)

    request, run = tracer.spans
    assert (request.name, run.name) == ("POST /v1/jobs", "run")
    assert request.run_id == run.run_id == job["latest_run"]["run_id"]
    assert run.is_run
    assert run.attributes["conveyor.tasks.total"] == 2


async def test_a_request_that_changes_nothing_is_not_recorded() -> None:
    world, tracer = make_traced_world()

    await world.get("/v1/jobs")

    assert tracer.spans == []


def test_a_million_tasks_record_about_a_thousand_fetches() -> None:
    recorded = sum(map(is_traced_fetch, range(1_000_000)))

    assert 1_000 <= recorded <= 1_010


def test_the_trace_id_of_a_run_has_128_bits() -> None:
    assert ulid_number("7ZZZZZZZZZZZZZZZZZZZZZZZZZ") == (1 << 128) - 1
    assert ulid_number("00000000000000000000000001") == 1


def test_each_request_begins_without_a_run() -> None:
    assert begin_request().run_id is None


def test_nothing_is_exported_without_an_endpoint() -> None:
    assert otlp_settings_from({}).signals == frozenset()
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}
    assert otlp_settings_from(endpoint).signals == {"traces", "metrics"}
    assert otlp_settings_from({**endpoint, "OTEL_SDK_DISABLED": "true"}).signals == frozenset()
    assert otlp_settings_from({**endpoint, "OTEL_METRICS_EXPORTER": "none"}).signals == {"traces"}
