"""The crash matrix of the AWS engine: a process ends before or after any call that it makes, other
processes continue, the client repeats its request with its key, and each request had its effect
once.

The crash points are the calls that a reference run makes today. By default every operation is a
point once for the API and once for a worker, on one side. CONVEYOR_TEST_CRASH_POINTS=each takes
both sides and the calls to Redis; =all takes every call of every step of the API, and the calls of
a worker at growing numbers. Those two write their part of tests/chaos/MATRIX.md. A point that is
not reached is tried again; then it is a failure.
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
from tests.e2e.cloud import Cloud, a_client, aws_deployment
from tests.e2e.crash_steps import RepeatedRequest, StepFactory, Urls
from tests.e2e.programs import a_site, until
from tests.e2e.proxy_log import counting_calls
from tests.e2e.receiver import Receiver, a_receiver

pytestmark = pytest.mark.slow

DEPTH = os.environ.get("CONVEYOR_TEST_CRASH_POINTS", "")
IS_ALL = DEPTH == "all"
TRIES = 3 if DEPTH else 1
AT_ONCE = 5
DISTANCES = (1, 2, 3, 5, 8, 13, 21)
SIDES = ("before", "after")
WORK = ("submit", "submit later", "rerun", "delete", "export")
# Work over which five workers in a row were lost fails with these reasons (SPEC.md 4.19, 4.3).
GIVEN_UP = ("ingest_failed", "the export could not be made")
# Step Functions refuses the token of no task, so the "after" side of this call is never reached.
REFUSED = ("stepfunctions.SendTaskSuccess",)
# Calls to Redis are not HTTP, so the proxy does not see them: these are calls of the port.
AFTER_TEN_S = ("coordinator.renew",)  # Only after a worker has held leases for ten seconds.
# The other calls of the port are rare in a worker, such as counting the leases of a stopped run.
REDIS = ("acquire", "acquire_hosts", "renew", "release", "put_status")


@dataclass(frozen=True, slots=True)
class Point:
    """A crash point; `step` is the request that the API serves at that moment."""

    call: str
    count: int
    side: str
    step: str = ""

    def __str__(self) -> str:
        return f"{self.call}:{self.count}:{self.side}"


@dataclass(slots=True)
class CrashSetup:
    cloud: Cloud
    factory: StepFactory
    receiver: Receiver

    def ask(self, step: str, client: httpx.Client) -> RepeatedRequest:
        requests = self.factory.steps[step]()
        requests.answer = requests.send(client)
        return requests

    def submit_work(self) -> list[RepeatedRequest]:
        """Submits work of every kind for a worker."""
        requests = [self.ask(step, self.factory.client) for step in WORK]
        body = {"tasks": self.factory.urls.tasks(1), "sfn_task_token": "of-no-task"}
        assert self.factory.client.post("/v1/jobs", json=body).status_code == 201
        gentle = {"tasks": self.factory.urls.tasks(4), "host_limits": {"concurrency": 1}}
        assert self.factory.client.post("/v1/jobs", json=gentle).status_code == 201
        return requests


@pytest.fixture(scope="module")
def setup(
    request: pytest.FixtureRequest, redis: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CrashSetup]:
    folder = tmp_path_factory.mktemp("crashes")
    with (
        a_site() as site,
        a_receiver() as receiver,
        aws_deployment(request, folder, redis=redis) as cloud,
    ):
        cloud.environ["CONVEYOR_SYNC_TASKS_MAX"] = "84"
        with a_client(cloud.api()) as client:
            urls = Urls(site.urls(110), receiver.url)
            yield CrashSetup(cloud, StepFactory(client, urls), receiver)


def api_points(setup: CrashSetup) -> tuple[list[Point], list[RepeatedRequest]]:
    """Returns every call that the API makes for each step, numbered since its start."""
    points, requests = [], []
    with (
        counting_calls(setup.cloud) as (environ, calls),
        a_client(setup.cloud.api(**environ)) as client,
    ):
        at_start = Counter(calls)
        points += [Point(call, n + 1, side) for call, n, side in _each(at_start, Counter())]
        for step in setup.factory.steps:
            prepared = setup.factory.steps[step]()
            before = Counter(calls)
            prepared.answer = prepared.send(client)
            requests.append(prepared)
            counts = _each(calls - before, at_start)
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
    """Returns the last point of each call, with alternating sides."""
    of_call = {point.call: point for point in points}
    last = [point for point in points if _is_at(point, of_call[point.call])]
    if DEPTH:
        return last
    sides = {call: SIDES[number % 2] for number, call in enumerate(sorted(of_call))}
    return [point for point in last if point.side == sides[point.call]]


def _is_at(point: Point, other: Point) -> bool:
    return (point.step, point.count) == (other.step, other.count)


def worker_points(setup: CrashSetup, requests: Sequence[RepeatedRequest]) -> list[Point]:
    """Returns the calls of a worker that does work of every kind."""
    with counting_calls(setup.cloud) as (environ, calls):
        worker = setup.cloud.start("worker", **environ)
        _wait_until_done(setup, requests)
        worker.kill()
        worker.wait()
    if DEPTH:
        calls.update({f"coordinator.{name}": 1 for name in REDIS})
    reference = sorted(calls.items())
    if not DEPTH:
        return [
            Point(call, 1, "before" if call in REFUSED else SIDES[number % 2])
            for number, (call, _) in enumerate(reference)
        ]
    return [
        Point(call, count, side)
        for call, counts in reference
        for count in (DISTANCES if IS_ALL else (1,))
        for side in SIDES
        if count <= counts and not (call in REFUSED and side == "after")
    ]


def test_a_crash_at_any_call_loses_no_request_and_repeats_no_effect(setup: CrashSetup) -> None:
    of_api, requests = api_points(setup)
    requests += setup.submit_work()
    of_worker = worker_points(setup, requests)

    missed_by_apis = _misses_of_apis(setup, of_api, requests)
    # Sent before workers start, because a stop after the last task has no effect.
    problems = [request.send_until_answered(setup.factory.client) for request in requests]
    missed_by_workers = _misses_of_workers(setup, of_worker, requests)
    setup.cloud.workers(2)
    problems += [request.send_until_answered(setup.factory.client) for request in requests]
    _wait_until_done(setup, requests, GIVEN_UP)
    until(
        "all webhooks to be delivered",
        lambda: not _undelivered(setup) or None,
        deadline_s=120,
        every_s=2,
    )

    bad = [problem for problem in problems if problem]
    bad += [*violations(setup.cloud), *_find_duplicates(setup)]
    if DEPTH:
        write_aws(DEPTH, of_api, of_worker, {*missed_by_apis, *missed_by_workers}, bad)
    print("not reached:", *missed_by_apis, *missed_by_workers)
    assert bad == []
    assert missed_by_apis == []
    # Workers share their work, so a worker may never make the eighth call of a kind.
    assert [
        point
        for point in missed_by_workers
        if DEPTH and point.count == 1 and point.call not in AFTER_TEN_S
    ] == []


def _misses_of_apis(
    setup: CrashSetup, points: Sequence[Point], requests: list[RepeatedRequest]
) -> list[Point]:
    for _ in range(TRIES):
        waves = _report_progress(_waves(points), "API", len(points))
        points = [point for wave in waves for point in _crash_apis(setup, wave, requests)]
    return list(points)


def _misses_of_workers(
    setup: CrashSetup, points: Sequence[Point], requests: list[RepeatedRequest]
) -> list[Point]:
    for _ in range(TRIES):
        missed = []
        for wave in _report_progress(_waves(points), "worker", len(points)):
            requests += setup.submit_work()
            missed += _crash_workers(setup, wave)
        points = missed
    return list(points)


def _report_progress(
    waves: Iterator[Sequence[Point]], whose: str, of: int
) -> Iterator[Sequence[Point]]:
    """Prints a line for each wave of crashes."""
    for number, wave in enumerate(waves):
        print(f"{whose} {number * AT_ONCE}/{of}:", *wave, flush=True)
        yield wave


def _waves(points: Sequence[Point]) -> Iterator[Sequence[Point]]:
    return (points[start : start + AT_ONCE] for start in range(0, len(points), AT_ONCE))


def _crash_apis(
    setup: CrashSetup, wave: Sequence[Point], requests: list[RepeatedRequest]
) -> list[Point]:
    """Sends each request to a process that crashes. Returns the points that were not reached."""
    started = [(point, setup.cloud.start("api", TEST_CRASH_AT=str(point))) for point in wave]
    missed = []
    for point, process in started:
        url = setup.cloud.url_of(process)
        with ExitStack() as clients:
            client = clients.enter_context(a_client(url)) if url else _client_of_nothing(clients)
            if point.step:
                requests.append(setup.ask(point.step, client))
                if requests[-1].answer is None:
                    process.wait(timeout=30)
        if not _has_crashed(setup.cloud, process.pid):
            missed.append(point)
    return missed


def _client_of_nothing(clients: ExitStack) -> httpx.Client:
    """Returns a client of an address at which no server listens."""
    return clients.enter_context(a_client("http://127.0.0.1:1"))


def _crash_workers(setup: CrashSetup, wave: Sequence[Point]) -> list[Point]:
    workers = [setup.cloud.start("worker", TEST_CRASH_AT=str(point)) for point in wave]
    with suppress(AssertionError):  # The caller reports points without a crash.
        until(
            "the workers to crash",
            lambda: all(worker.poll() is not None for worker in workers) or None,
            deadline_s=20 if IS_ALL else 60,
        )
    return [
        point
        for point, worker in zip(wave, workers, strict=True)
        if not _has_crashed(setup.cloud, worker.pid)
    ]


def _has_crashed(cloud: Cloud, pid: int) -> bool:
    """Returns whether the process crashed at its point; kills it if not."""
    (process,) = [candidate for candidate in cloud.processes if candidate.pid == pid]
    if process.poll() is None:
        process.kill()
        process.wait()
        return False
    assert process.returncode == 137, cloud.log_of(process)
    return True


def _wait_until_done(
    setup: CrashSetup, requests: Sequence[RepeatedRequest], excuses: Sequence[str] = ()
) -> None:
    waiting = dict.fromkeys(range(len(requests)), "")

    def is_done() -> bool | None:
        for number in list(waiting):
            problem = requests[number].verify(setup.factory.client)
            if problem is None or any(excuse in problem for excuse in excuses):
                del waiting[number]
            else:
                waiting[number] = f"{requests[number].name}: {problem}"
        return not waiting or None

    try:
        until("everything to be done", is_done, deadline_s=300, every_s=2)
    except AssertionError:
        pytest.fail("\n".join([f"{len(waiting)} are not done:", *waiting.values()]))


def _find_duplicates(setup: CrashSetup) -> list[str]:
    """Returns the keys for which more than one job was created."""
    counts = Counter(row.get("external_id") for row in rows_of(setup.cloud, "Job"))
    return [key for key, count in counts.items() if key and count > 1]


def _undelivered(setup: CrashSetup) -> list[str]:
    """Returns the notices of runs that no delivery has carried."""
    event_ids = {delivery.headers["X-ZenRows-Event-Id"] for delivery in setup.receiver.received}
    notices = [row for row in rows_of(setup.cloud, "Notice") if row["pk"].startswith("Notice#")]
    due = [row["notice_id"] for row in notices if row.get("channel", "webhook") == "webhook"]
    return [notice for notice in due if notice not in event_ids]
