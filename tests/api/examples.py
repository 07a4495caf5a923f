"""The examples of the OpenAPI document: each is sent to the API over the memory engine, which is in
the situation that the operation needs. `make docs` keeps the responses; a test compares them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlencode

import msgspec
import trio
from trio.testing import MockClock

from conveyor.api.route import Route
from conveyor.api.server.app import ROUTES, make_app
from conveyor.api.server.auth import Passthrough
from conveyor.api.server.openapi import ExampleResponse
from conveyor.domain.crawl_record import run_of
from conveyor.domain.ids import JobId
from conveyor.domain.model import Task
from conveyor.usecases import crawl as crawls
from conveyor.usecases import export as exports
from conveyor.usecases.crawl import Advance, CrawlMemory
from tests.api.world import SECRET, Seen, World, make_world

Ids = dict[str, str]
Situation = Callable[[World], Awaitable[Ids]]

LINES = [{"url": f"https://shop.example/{name}", "external_id": name} for name in "abc"]
HOOK = {"url": "https://hooks.example/conveyor", "signature": False}


async def submitted(world: World, **fields: Any) -> Ids:
    """A live run of three tasks."""
    seen = await world.post("/v1/jobs", {"tasks": LINES, "name": "prices", **fields})
    assert seen.status == 201, seen.body
    return _ids_of(seen.json)


async def ended(world: World) -> Ids:
    """A completed run of a job with a webhook: two pages and one failure."""
    ids = await submitted(world, webhook=HOOK)
    first, *others = await world.tasks_of(ids["job_id"], ids["run_id"])
    world.clock.advance(2.0)
    for task in others:
        await world.succeed(ids["job_id"], task, b"<p>A page</p>")
    await world.fail(ids["job_id"], first)
    deliveries = await world.get(f"/v1/jobs/{ids['job_id']}/webhook/deliveries")
    event_id = deliveries.json["deliveries"][0]["event_id"]
    return {**ids, "task_id": others[0].task_id, "event_id": event_id}


async def fetching(world: World) -> Ids:
    """A live run with a task in flight."""
    ids = await submitted(world)
    task, *_ = await world.tasks_of(ids["job_id"], ids["run_id"])
    await world.claim(ids["job_id"], task)
    world.clock.advance(12.0)
    return ids


async def left_open(world: World) -> Ids:
    return await submitted(world, status="open")


async def paused(world: World) -> Ids:
    ids = await submitted(world)
    await world.post(f"/v1/jobs/{ids['job_id']}/pause")
    return ids


async def with_budget(world: World) -> Ids:
    return await submitted(world, budget={"credits": 1000})


async def with_host_limits(world: World) -> Ids:
    return await submitted(world, host_limits={"concurrency": 2})


async def scheduled(world: World) -> Ids:
    schedule = {"rate": {"every": 1, "unit": "hour"}}
    body = {"type": "scheduled", "schedule": schedule, "tasks": LINES}
    return _ids_of((await world.post("/v1/jobs", body)).json)


async def exported(world: World) -> Ids:
    ids = await ended(world)
    path = f"/v1/jobs/{ids['job_id']}/runs/{ids['run_id']}/exports"
    started = await world.post(f"{path}?format=jsonl")
    for export in await exports.due(world.env, limit=10):
        await exports.process(world.env, export)
    return {**ids, "export_id": started.json["export_id"]}


async def crawled(world: World) -> Ids:
    """A crawl that has kept one page."""
    body = {"url": "https://shop.example/", "output_format": "html"}
    crawl_id = (await world.post("/v1/crawls", body)).json["crawl_id"]
    page = await _advance_crawl(world, JobId(crawl_id))
    await world.fail(crawl_id, page)  # There is no robots.txt.
    page = await _advance_crawl(world, JobId(crawl_id))
    await world.succeed(crawl_id, page, b"<p>A page</p>")
    await _advance_crawl(world, JobId(crawl_id))
    return {"crawl_id": crawl_id, "content_id": page.task_id}


async def _advance_crawl(world: World, crawl_id: JobId) -> Task:
    """Takes the steps that are possible. Returns the task that was found last."""
    memory, outcome = CrawlMemory(), Advance.ADVANCED
    while outcome is Advance.ADVANCED:
        crawl = await crawls.of_job(world.env, crawl_id)
        assert crawl is not None
        outcome, _ = await crawls.advance(world.env, crawl, memory)
    tasks = await world.tasks_of(crawl_id, run_of(crawl_id))
    return max(tasks, key=lambda task: task.batch_id)


async def with_slot(world: World) -> Ids:
    body = {"csv": {"fields": {"url": 0}, "header": True}}
    return {"input_id": (await world.post("/v1/job_inputs", body)).json["file_input_id"]}


async def with_candidate(world: World) -> Ids:
    for _ in range(2):
        await world.post("/v1/hmac/keys/rotate")
    return {}


async def inspected(world: World) -> Ids:
    """A process whose operator shows the tree of actors."""
    world.app = make_app(
        world.env,
        Passthrough(SECRET),
        notifier=world.receiver,
        metrics=world.metrics,
        ready=lambda: True,
        inspect=lambda: {"name": "service", "children": []},
    )
    return {}


async def with_docs(world: World) -> Ids:
    return {"file": "docs.js"}


async def empty(world: World) -> Ids:
    return {}


SITUATIONS: Mapping[str, Situation] = {
    "listJobRunFetches": fetching,
    "submitJob": empty,
    "addTasks": left_open,
    "closeJob": left_open,
    "stopJob": submitted,
    "cancelJob": submitted,
    "pauseJob": submitted,
    "resumeJob": paused,
    "setJobBudget": with_budget,
    "setJobHostLimits": submitted,
    "deleteJobHostLimits": with_host_limits,
    "updateJobSchedule": scheduled,
    "updateScheduleState": scheduled,
    "getResultsExport": exported,
    "getResultsExportContent": exported,
    "createCrawl": empty,
    "listCrawls": crawled,
    "getCrawl": crawled,
    "stopCrawl": crawled,
    "getCrawlContent": crawled,
    "downloadCrawl": crawled,
    "createJobInput": empty,
    "uploadJobInput": with_slot,
    "listHMACKeys": with_candidate,
    "rotateHMACKey": empty,
    "cancelHMACRotation": with_candidate,
    "finalizeHMACKey": with_candidate,
    "getActors": inspected,
    "getDocsFile": with_docs,
}
"""The situations of operations that need another one than `ended`."""

# A request for each of these statuses, and the body that it has.
REFUSED: Mapping[int, tuple[str, str, Any]] = {
    400: ("POST", "/v1/jobs", {"tasks": [], "priority": 11}),
    401: ("GET", "/v1/jobs", None),
    404: ("GET", "/v1/jobs/01JD0000000000000000000000", None),
    409: ("POST", "/v1/hmac/keys/rotate/finalize", None),
    422: ("GET", "/v1/jobs/{job_id}/tasks/{task_id}/content", None),
}


def _ids_of(job: Any) -> Ids:
    run = job.get("latest_run")
    return {"job_id": job["job_id"], **({} if run is None else {"run_id": run["run_id"]})}


async def send_example(route: Route) -> tuple[Seen, Ids]:
    """Sends the example of a route. Returns the response and the ids in the path."""
    world = make_world()
    ids = await SITUATIONS.get(route.name, ended)(world)
    path = route.path.format_map(ids)
    if route.example.query:
        path += f"?{urlencode(route.example.query)}"
    body = route.example.body
    # The same id in each run of the examples; otherwise a random one.
    headers = {"X-Request-ID": "example"}
    if isinstance(body, str):
        text = {"Content-Type": "text/csv", "Content-Length": str(len(body))}
        seen = await world.call(route.method, path, raw=body.encode(), headers={**headers, **text})
    else:
        seen = await world.call(route.method, path, body, headers=headers)
    return seen, {name: ids[name] for name in ids if f"{{{name}}}" in route.path}


async def send_refused(status: int) -> Seen:
    """Sends a request that is refused with this status."""
    method, path, body = REFUSED[status]
    world = make_world()
    ids = await ended(world)
    if status == 422:
        ids["task_id"] = (await world.tasks_of(ids["job_id"], ids["run_id"]))[0].task_id
    key = None if status == 401 else "anna-key"
    headers = {"X-Request-ID": "example"}
    return await world.call(method, path.format_map(ids), body, key=key, headers=headers)


def record() -> dict[str, Any]:
    """The responses to all examples and refused requests, for reference.json."""

    async def collect() -> dict[str, Any]:
        responses = {}
        for route in ROUTES:
            seen, ids = await send_example(route)
            is_typed = isinstance(route.answers.get(seen.status), type)
            body = seen.json if is_typed else None
            responses[route.name] = ExampleResponse(seen.status, ids, body)
        problems = {status: (await send_refused(status)).json for status in REFUSED}
        return {"responses": responses, "problems": problems}

    # The examples contain durations, which must not depend on how busy the machine is.
    clock = MockClock(autojump_threshold=0)
    recorded: dict[str, Any] = msgspec.to_builtins(trio.run(collect, clock=clock), str_keys=True)
    return recorded
