"""What operators see: health, readiness, metrics, the document, the tree, and honest failures."""

from __future__ import annotations

import logging

import jsonschema
import msgspec
import pytest
import trio

from conveyor import __version__
from conveyor.api.server import app as application
from conveyor.api.server.app import ROUTES, make_app
from conveyor.api.server.auth import KeyList, Origins, Passthrough
from conveyor.domain.changes import Change, Verdict
from conveyor.domain.errors import Unauthenticated
from conveyor.ports.errors import StorageFull, Unavailable
from tests.api.world import ANNA, SECRET, World


async def test_health_is_about_being_alive_and_readiness_about_wanting_traffic(
    world: World,
) -> None:
    assert (await world.get("/healthz", key=None)).json == {
        "status": "ok",
        "version": __version__,
        "build": "unknown",
    }
    assert (await world.get("/readyz", key=None)).status == 200

    world.is_ready[0] = False

    seen = await world.get("/readyz", key=None)
    assert (seen.status, seen.code) == (503, "not_ready")
    assert seen.headers["Retry-After"] == "2"
    assert (await world.get("/healthz", key=None)).status == 200


async def test_requests_are_counted_by_route_never_by_address(world: World) -> None:
    job = await world.submit()
    await world.get(f"/v1/jobs/{job['job_id']}")
    await world.get("/v1/nothing")

    text = (await world.get("/metrics", key=None)).body.decode()

    assert (
        'conveyor_http_requests_total{method="GET",route="/v1/jobs/<string:job_id>",status="200"}'
        in text
    )
    assert 'route="none",status="404"' in text
    assert job["job_id"] not in text


async def test_the_tree_is_shown_only_where_it_was_given(world: World) -> None:
    assert (await world.get("/debug/actors", key=None)).status == 404

    world.app = make_app(
        world.env,
        Passthrough(SECRET),
        notifier=world.receiver,
        metrics=world.metrics,
        ready=lambda: True,
        inspect=lambda: {"name": "root"},
    )

    assert (await world.get("/debug/actors", key=None)).json == {"name": "root"}


async def test_an_error_that_nobody_foresaw_says_nothing_of_itself(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def explode(key: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(world.engine.store, "read", explode)

    with caplog.at_level(logging.ERROR):
        seen = await world.get("/v1/jobs/01JZZZZZZZZZZZZZZZZZZZZZZZ")

    assert (seen.status, seen.code) == (500, "internal")
    assert b"secret" not in seen.body
    assert "ZeroDivisionError" in caplog.text


async def test_a_full_disk_is_told_apart(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def commit(changes: list[Change]) -> list[Verdict]:
        raise StorageFull("no room")

    monkeypatch.setattr(world.engine.store, "commit", commit)

    seen = await world.post("/v1/jobs", {"tasks": [{"url": "https://example.com/"}]})

    assert (seen.status, seen.code) == (507, "storage_full")


async def test_work_that_takes_too_long_is_given_up_and_said_so(
    world: World, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async def commit(changes: list[Change]) -> list[Verdict]:
        await trio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(world.engine.store, "commit", commit)

    seen = await world.post("/v1/jobs", {"tasks": [{"url": "https://example.com/"}]})

    assert (seen.status, seen.code) == (503, "unavailable")
    assert trio.current_time() < application.WORK_TIMEOUT_S + 10


async def test_a_client_that_hangs_up_does_not_undo_what_was_begun(
    world: World, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    whole = world.engine.store.commit
    start_event = trio.Event()

    async def slow_commit(changes: list[Change]) -> list[Verdict]:
        start_event.set()
        await trio.sleep(5)
        return await whole(changes)

    monkeypatch.setattr(world.engine.store, "commit", slow_commit)
    body = b'{"tasks":[{"url":"https://example.com/"}]}'
    events = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, object]:
        for event in events:
            return event
        await start_event.wait()
        return {"type": "http.disconnect"}

    async def send(event: object) -> None:
        await trio.lowlevel.checkpoint()
        raise AssertionError("nobody is there to hear it")

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/jobs",
        "query_string": b"",
        "headers": [(b"x-api-key", ANNA.encode()), (b"content-type", b"application/json")],
    }
    await world.app.asgi_app(scope, receive, send)  # type: ignore[arg-type]

    assert len((await world.get("/v1/jobs")).json["jobs"]) == 1


async def test_the_document_describes_every_route_and_only_those(world: World) -> None:
    document = (await world.get("/openapi.json", key=None)).json

    described = {
        (method.upper(), path)
        for path, operations in document["paths"].items()
        for method in operations
    }
    registered = {
        (method, rule.rule.replace("<string:", "{").replace(">", "}"))
        for rule in world.app.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD"}
    }
    assert described == registered == {(route.method, route.path) for route in ROUTES}
    names = [route.name for route in ROUTES]
    assert len(set(names)) == len(names)


async def test_every_reference_in_the_document_leads_somewhere(world: World) -> None:
    document = (await world.get("/openapi.json", key=None)).json
    found: list[str] = []

    def walk(node: object) -> None:
        if isinstance(node, dict):
            found.extend(str(node[key]) for key in node if key == "$ref")
            for child in node.values():
                walk(child)
        elif isinstance(node, list):
            for child in node:
                walk(child)

    walk(document)
    schemas = document["components"]["schemas"]
    assert found
    known = {
        f"#/components/{kind}/{name}"
        for kind in ("schemas", "responses")
        for name in document["components"][kind]
    }
    assert set(found) <= known
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


async def test_what_we_answer_is_what_our_own_document_says(world: World) -> None:
    document = (await world.get("/openapi.json", key=None)).json
    job = await world.submit(2, webhook={"url": "https://hooks.example.com/"}, name="n")
    await world.finish(job)
    path = f"/v1/jobs/{job['job_id']}"
    samples = {
        "JobResponse": await world.get(path),
        "ListJobsResponse": await world.get("/v1/jobs"),
        "ListJobRunsResponse": await world.get(f"{path}/runs"),
        "ListResultsResponse": await world.get(f"{path}/results"),
        "ProblemResponse": await world.get("/v1/jobs/x"),
    }

    for name, seen in samples.items():
        schema = {
            "$ref": f"#/components/schemas/{name}",
            "components": document["components"],
        }
        jsonschema.Draft202012Validator(schema).validate(seen.json)


def test_a_key_list_lets_in_its_keys_only_and_forwards_none() -> None:
    auth = KeyList.of(["one", "two"], secret=SECRET)

    assert auth.identify("one") == auth.identify("one")
    assert auth.identify("one").caller != auth.identify("two").caller
    assert auth.identify("one").forwarded_key is None
    for other in ("three", "", "onee", "ONE"):
        with pytest.raises(Unauthenticated):
            auth.identify(other)


def test_passthrough_names_the_caller_without_keeping_the_key() -> None:
    principal = Passthrough(SECRET).identify("my-key")

    assert "my-key" not in principal.caller
    assert principal.forwarded_key == "my-key"
    assert principal.caller != Passthrough(b"t" * 32).identify("my-key").caller


async def test_unknown_keys_are_turned_away_in_key_list_mode(world: World) -> None:
    world.app = make_app(
        world.env,
        KeyList.of([ANNA], secret=SECRET),
        notifier=world.receiver,
        metrics=world.metrics,
        ready=lambda: True,
    )

    assert (await world.get("/v1/jobs", key=ANNA)).status == 200
    assert (await world.get("/v1/jobs", key="other")).status == 401


async def test_links_are_made_for_the_address_that_callers_see(world: World) -> None:
    world.app = make_app(
        world.env,
        Passthrough(SECRET),
        notifier=world.receiver,
        metrics=world.metrics,
        ready=lambda: True,
        origins=Origins(public_url="https://api.example.com"),
    )
    job = await world.submit(1)
    await world.finish(job)

    (row,) = (await world.get(f"/v1/jobs/{job['job_id']}/results")).json["results"]

    assert row["result_url"].startswith("https://api.example.com/v1/jobs/")


async def test_the_forwarded_key_is_sealed_on_the_job(world: World) -> None:
    job = await world.submit(1)

    run = await world.run(job["job_id"], job["latest_run"]["run_id"])
    stored = msgspec.json.encode(run) + b"".join(
        msgspec.json.encode(row) for row in world.engine.store._jobs.values()
    )
    assert ANNA.encode() not in stored


class _Denied(Unavailable):
    needs_operator = True
    code = "AccessDeniedException"


@pytest.mark.parametrize(
    ("error", "level", "code"),
    [
        (Unavailable("SendMessageBatch: timed out"), logging.WARNING, "Unavailable"),
        (StorageFull("No space left on device"), logging.WARNING, "StorageFull"),
        (_Denied("SendMessageBatch: denied"), logging.ERROR, "AccessDeniedException"),
    ],
)
async def test_the_cause_of_an_outage_is_logged_with_its_request_id(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Unavailable,
    level: int,
    code: str,
) -> None:
    async def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(world.engine.store, "find", fail)

    with caplog.at_level(logging.WARNING):
        refused = await world.get("/v1/jobs")

    (line,) = [record for record in caplog.records if "unavailable" in record.message]
    assert refused.status in {503, 507}
    assert line.levelno == level
    assert line.__dict__["request_id"] == refused.headers["X-Request-ID"]
    assert (line.__dict__["cause"], line.__dict__["code"]) == (str(error), code)
    assert str(error) not in refused.json["detail"]
