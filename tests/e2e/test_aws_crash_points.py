"""The crash matrix of the AWS engine: a process ends before or after any call that it makes,
another goes on, the client asks again with its key, and everything has happened once.

A reference run is listened to, so that the points are what the program does today. By default every
operation is a point once for the API and once for a worker, on one side;
CONVEYOR_TEST_CRASH_POINTS=each takes both sides and the calls that reach Redis, and =all takes
every call of every step of the API, and the calls of a worker at growing distances. Those two write
their part of tests/chaos/MATRIX.md. A point that is not met is tried again, and then is a failure.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import httpx
import pytest

from tests.chaos.aws_page import write_aws
from tests.e2e.aws_audit import rows_of, violations
from tests.e2e.cloud import Cloud, a_client, a_cloud
from tests.e2e.crash_steps import Asked, Desk, Urls
from tests.e2e.programs import a_site, until
from tests.e2e.proxy_log import tapped
from tests.e2e.receiver import Receiver, a_receiver

pytestmark = pytest.mark.slow

DEPTH = os.environ.get("CONVEYOR_TEST_CRASH_POINTS", "")
IS_ALL = DEPTH == "all"
TRIES = 3 if DEPTH else 1
AT_ONCE = 5
DISTANCES = (1, 2, 3, 5, 8, 13, 21)
SIDES = ("before", "after")
FED = ("submit", "submit later", "rerun", "delete", "export")
# What five workers in a row were lost over is given up, and says so (SPEC.md 4.19, 4.3).
GIVEN_UP = ("ingest_failed", "the export could not be made")
# A token that no task has is refused, and a refusal is not passed on its far side.
REFUSED = ("stepfunctions.SendTaskSuccess",)
# What goes to Redis is not HTTP, and cannot be listened to: these are calls of the port.
LATE = ("coordinator.renew",)  # By a worker that has lived and held leases for ten seconds.
# A worker looks at marks never, and counts leases only of a run that is being stopped.
REDIS = ("acquire", "acquire_hosts", "renew", "release", "put_status")


@dataclass(frozen=True, slots=True)
class Point:
    """Where a process ends; `step` is what the API is asked for meanwhile."""

    call: str
    count: int
    side: str
    step: str = ""

    def __str__(self) -> str:
        return f"{self.call}:{self.count}:{self.side}"


@dataclass(slots=True)
class Scene:
    cloud: Cloud
    desk: Desk
    receiver: Receiver

    def ask(self, step: str, client: httpx.Client) -> Asked:
        requests = self.desk.steps[step]()
        requests.answer = requests.send(client)
        return requests

    def feed(self) -> list[Asked]:
        """Work of every kind for a worker; the API answers, and nobody has done it yet."""
        requests = [self.ask(step, self.desk.client) for step in FED]
        body = {"tasks": self.desk.urls.tasks(1), "sfn_task_token": "of-no-task"}
        assert self.desk.client.post("/v1/jobs", json=body).status_code == 201
        gentle = {"tasks": self.desk.urls.tasks(4), "host_limits": {"concurrency": 1}}
        assert self.desk.client.post("/v1/jobs", json=gentle).status_code == 201
        return requests


@pytest.fixture(scope="module")
def scene(
    request: pytest.FixtureRequest, redis: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("crashes")
    with a_site() as site, a_receiver() as receiver, a_cloud(request, folder, redis=redis) as cloud:
        cloud.environ["CONVEYOR_SYNC_TASKS_MAX"] = "84"
        with a_client(cloud.api()) as client:
            urls = Urls(site.urls(110), receiver.url)
            yield Scene(cloud, Desk(client, urls), receiver)


def api_points(scene: Scene) -> tuple[list[Point], list[Asked]]:
    """Every call that the API makes for each step, by its number since the start."""
    points, requests = [], []
    with tapped(scene.cloud) as (environ, heard), a_client(scene.cloud.api(**environ)) as client:
        at_start = Counter(heard)
        points += [Point(call, n + 1, side) for call, n, side in _each(at_start, Counter())]
        for step in scene.desk.steps:
            prepared = scene.desk.steps[step]()
            before = Counter(heard)
            prepared.answer = prepared.send(client)
            requests.append(prepared)
            counts = _each(heard - before, at_start)
            points += [Point(call, n + 1, side, step) for call, n, side in counts]
    return (points if IS_ALL else _sample(points)), requests


def _each(counts: Counter[str], at_start: Counter[str]) -> list[tuple[str, int, str]]:
    return [
        (call, at_start[call] + number, side)
        for call, count in sorted(counts.items())
        for number in range(count)
        for side in SIDES
    ]


def _sample(points: Sequence[Point]) -> list[Point]:
    """The last point of each call, on one side and the other in turn."""
    of_call = {point.call: point for point in points}
    last = [point for point in points if _is_at(point, of_call[point.call])]
    if DEPTH:
        return last
    sides = {call: SIDES[number % 2] for number, call in enumerate(sorted(of_call))}
    return [point for point in last if point.side == sides[point.call]]


def _is_at(point: Point, other: Point) -> bool:
    return (point.step, point.count) == (other.step, other.count)


def worker_points(scene: Scene, requests: Sequence[Asked]) -> list[Point]:
    """The calls of a worker that does work of every kind, to its end."""
    with tapped(scene.cloud) as (environ, heard):
        worker = scene.cloud.start("worker", **environ)
        _wait_until_done(scene, requests)
        worker.kill()
        worker.wait()
    if DEPTH:
        heard.update({f"coordinator.{name}": 1 for name in REDIS})
    calls = sorted(heard.items())
    if not DEPTH:
        return [
            Point(call, 1, "before" if call in REFUSED else SIDES[number % 2])
            for number, (call, _) in enumerate(calls)
        ]
    return [
        Point(call, count, side)
        for call, counts in calls
        for count in (DISTANCES if IS_ALL else (1,))
        for side in SIDES
        if count <= counts and not (call in REFUSED and side == "after")
    ]


def test_a_crash_at_any_call_loses_nothing_and_does_nothing_twice(scene: Scene) -> None:
    of_api, requests = api_points(scene)
    requests += scene.feed()
    of_worker = worker_points(scene, requests)

    missed = _misses_of_apis(scene, of_api, requests)
    # Before there are workers: a stop that comes after the last task stops nothing.
    complaints = [request.send_until_answered(scene.desk.client) for request in requests]
    lazy = _misses_of_workers(scene, of_worker, requests)
    scene.cloud.workers(2)
    complaints += [request.send_until_answered(scene.desk.client) for request in requests]
    _wait_until_done(scene, requests, GIVEN_UP)
    until("all to be told", lambda: not _untold(scene) or None, deadline_s=120, every_s=2)

    bad = [complaint for complaint in complaints if complaint]
    bad += [*violations(scene.cloud), *_find_doubles(scene)]
    if DEPTH:
        write_aws(DEPTH, of_api, of_worker, {*missed, *lazy}, bad)
    print("not met:", *missed, *lazy)
    assert bad == []
    assert missed == []
    # Workers share their work: which of them makes the eighth call, if any, is not ours to say.
    assert [point for point in lazy if DEPTH and point.count == 1 and point.call not in LATE] == []


def _misses_of_apis(scene: Scene, points: Sequence[Point], requests: list[Asked]) -> list[Point]:
    for _ in range(TRIES):
        waves = _report_progress(_waves(points), "API", len(points))
        points = [point for wave in waves for point in _crash_apis(scene, wave, requests)]
    return list(points)


def _misses_of_workers(scene: Scene, points: Sequence[Point], requests: list[Asked]) -> list[Point]:
    for _ in range(TRIES):
        missed = []
        for wave in _report_progress(_waves(points), "worker", len(points)):
            requests += scene.feed()
            missed += _crash_workers(scene, wave)
        points = missed
    return list(points)


def _report_progress(
    waves: Iterator[Sequence[Point]], whose: str, of: int
) -> Iterator[Sequence[Point]]:
    """A line for each wave, so that whoever waits knows for what."""
    for number, wave in enumerate(waves):
        print(f"{whose} {number * AT_ONCE}/{of}:", *wave, flush=True)
        yield wave


def _waves(points: Sequence[Point]) -> Iterator[Sequence[Point]]:
    return (points[start : start + AT_ONCE] for start in range(0, len(points), AT_ONCE))


def _crash_apis(scene: Scene, wave: Sequence[Point], requests: list[Asked]) -> list[Point]:
    """Sends each request to a process that ends on its way; answers the points not passed."""
    started = [(point, scene.cloud.start("api", TEST_CRASH_AT=str(point))) for point in wave]
    missed = []
    for point, process in started:
        url = scene.cloud.url_of(process)
        with ExitStack() as clients:
            client = clients.enter_context(a_client(url)) if url else _nobody(clients)
            if point.step:
                requests.append(scene.ask(point.step, client))
                if requests[-1].answer is None:
                    process.wait(timeout=30)
        if not _has_crashed(scene.cloud, process.pid):
            missed.append(point)
    return missed


def _nobody(clients: ExitStack) -> httpx.Client:
    """A client of a server that is not there."""
    return clients.enter_context(a_client("http://127.0.0.1:1"))


def _crash_workers(scene: Scene, wave: Sequence[Point]) -> list[Point]:
    workers = [scene.cloud.start("worker", TEST_CRASH_AT=str(point)) for point in wave]
    with suppress(AssertionError):  # Those that did not are told.
        until(
            "the workers to crash",
            lambda: all(worker.poll() is not None for worker in workers) or None,
            deadline_s=20 if IS_ALL else 60,
        )
    return [
        point
        for point, worker in zip(wave, workers, strict=True)
        if not _has_crashed(scene.cloud, worker.pid)
    ]


def _has_crashed(cloud: Cloud, pid: int) -> bool:
    """By itself, where it was to; one that lives on is ended here."""
    (process,) = [candidate for candidate in cloud.processes if candidate.pid == pid]
    if process.poll() is None:
        process.kill()
        process.wait()
        return False
    assert process.returncode == 137, cloud.log_of(process)
    return True


def _wait_until_done(scene: Scene, requests: Sequence[Asked], excuses: Sequence[str] = ()) -> None:
    waiting = dict.fromkeys(range(len(requests)), "")

    def is_done() -> bool | None:
        for number in list(waiting):
            complaint = requests[number].verify(scene.desk.client)
            if complaint is None or any(excuse in complaint for excuse in excuses):
                del waiting[number]
            else:
                waiting[number] = f"{requests[number].name}: {complaint}"
        return not waiting or None

    try:
        until("everything to be done", is_done, deadline_s=300, every_s=2)
    except AssertionError:
        pytest.fail("\n".join([f"{len(waiting)} are not done:", *waiting.values()]))


def _find_doubles(scene: Scene) -> list[str]:
    """Keys by which more than one job was made."""
    counts = Counter(row.get("external_id") for row in rows_of(scene.cloud, "Job"))
    return [key for key, count in counts.items() if key and count > 1]


def _untold(scene: Scene) -> list[str]:
    """Runs with a webhook whose end nobody was told of; each event has one id."""
    event_ids = {delivery.headers["X-ZenRows-Event-Id"] for delivery in scene.receiver.received}
    notices = [row for row in rows_of(scene.cloud, "Notice") if row["pk"].startswith("Notice#")]
    due = [row["notice_id"] for row in notices if row.get("channel", "webhook") == "webhook"]
    return [notice for notice in due if notice not in event_ids]
