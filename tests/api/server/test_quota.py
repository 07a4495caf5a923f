"""Quotas over HTTP: what a caller has too much of is refused by name, and nothing else is."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from conveyor.api.server.quota import (
    CALLER_PAGES_MAX,
    PAGES_MAX,
    RequestQuotas,
    group_address,
)
from conveyor.domain import limits
from conveyor.domain.changes import Change, Update, Verdict
from conveyor.domain.ids import CallerId, LeaseId
from conveyor.domain.quota import DEFAULTS, Quota, QuotaExceeded
from conveyor.domain.submit.admission import check_growth
from conveyor.ports.coordinator import Coordinator
from conveyor.ports.errors import Unavailable
from conveyor.usecases.quota import TURN_S
from tests.api.world import ANNA, BERT, Seen, World, make_world
from tests.usecases.faults import Fault, FaultyStore, When


def _world(**quotas: int | None) -> World:
    limits = {**DEFAULTS, **{Quota(name): limit for name, limit in quotas.items()}}
    return make_world(quotas=limits)


def _list(count: int, **more: Any) -> dict[str, Any]:
    return {"tasks": [{"url": f"https://example.com/{n}"} for n in range(count)], **more}


async def _submit(world: World, count: int = 1, key: str = ANNA, **more: Any) -> Seen:
    return await world.call("POST", "/v1/jobs", _list(count, **more), key=key)


def _is_refused(seen: Seen, quota: str) -> bool:
    if seen.status != 429:
        return False
    assert (seen.code, seen.json["quota"]) == ("quota_exceeded", quota)
    assert int(seen.headers["Retry-After"]) >= 1
    return True


async def test_a_caller_with_as_many_live_runs_as_it_may_have_starts_no_more() -> None:
    world = _world(live_runs=2)
    for _ in range(2):
        assert (await _submit(world)).status == 201

    assert _is_refused(await _submit(world), "live_runs")
    assert (await _submit(world, key=BERT)).status == 201


async def test_requests_at_the_same_time_do_not_exceed_a_quota_together() -> None:
    world = _world(live_runs=3)
    statuses: list[int] = []

    async def submit() -> None:
        seen = await _submit(world)
        statuses.append(seen.status)

    async with trio.open_nursery() as nursery:
        for _ in range(12):
            nursery.start_soon(submit)

    assert sorted(statuses) == [201] * 3 + [429] * 9


async def test_two_processes_do_not_exceed_a_quota_together() -> None:
    world = _world(live_runs=3)
    other = world.seen_through(world.env)
    statuses: list[int] = []

    async def submit(process: World) -> None:
        seen = await _submit(process)
        statuses.append(seen.status)

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(submit, (world, other)[number % 2])

    assert sorted(statuses) == [201] * 3 + [429] * 7


async def test_only_open_jobs_count_as_open() -> None:
    world = _world(open_jobs=1)
    assert (await _submit(world, status="open")).status == 201

    assert _is_refused(await _submit(world, status="open"), "open_jobs")
    assert (await _submit(world)).status == 201


async def test_stored_tasks_are_exceeded_by_one_list_at_most() -> None:
    world = _world(stored_tasks=10)
    job = await _submit(world, 12, status="open")
    assert job.status == 201

    assert _is_refused(await _submit(world), "stored_tasks")
    more = await world.call("POST", f"/v1/jobs/{job.json['job_id']}/tasks", _list(1))
    assert _is_refused(more, "stored_tasks")


async def test_a_rerun_counts_its_tasks_and_deleting_makes_room() -> None:
    world = _world(stored_tasks=5)
    job_id = (await _submit(world, 3)).json["job_id"]
    assert (await world.call("POST", f"/v1/jobs/{job_id}/stop")).status == 200
    assert (await world.call("POST", f"/v1/jobs/{job_id}/rerun")).status == 201
    await world.call("POST", f"/v1/jobs/{job_id}/stop")

    assert _is_refused(await world.call("POST", f"/v1/jobs/{job_id}/rerun"), "stored_tasks")
    assert (await world.call("DELETE", f"/v1/jobs/{job_id}")).status == 202
    assert (await _submit(world)).status == 201


async def test_a_lifted_quota_refuses_nothing() -> None:
    world = _world(live_runs=None, open_jobs=None, stored_tasks=None, stored_bytes=None)
    for _ in range(5):
        assert (await _submit(world, status="open")).status == 201


async def test_a_refusal_by_quota_is_not_kept_under_its_key() -> None:
    world = _world(live_runs=1)
    job_id = (await _submit(world)).json["job_id"]
    headers = {"Idempotency-Key": "again"}
    refused = await world.call("POST", "/v1/jobs", _list(1), headers=headers)
    await world.call("POST", f"/v1/jobs/{job_id}/stop")
    admitted = await world.call("POST", "/v1/jobs", _list(1), headers=headers)

    assert (refused.status, admitted.status) == (429, 201)


async def test_file_inputs_are_limited() -> None:
    world = _world(upload_slots=2)
    slot = {"format": "text"}
    for _ in range(2):
        assert (await world.call("POST", "/v1/job_inputs", slot)).status == 201

    assert _is_refused(await world.call("POST", "/v1/job_inputs", slot), "upload_slots")
    assert (await world.call("POST", "/v1/job_inputs", slot, key=BERT)).status == 201


async def test_exports_of_a_run_are_limited() -> None:
    world = _world(exports_per_run=2)
    job_id = (await _submit(world)).json["job_id"]
    run = (await world.call("POST", f"/v1/jobs/{job_id}/stop")).json
    run_id = (await world.get(f"/v1/jobs/{job_id}")).json["latest_run"]["run_id"]
    assert run
    path = f"/v1/jobs/{job_id}/runs/{run_id}/exports"
    for _ in range(2):
        assert (await world.call("POST", path)).status == 202

    assert _is_refused(await world.call("POST", path), "exports_per_run")


# The store below fails by what is written, not by the number of a call.
NEVER = 1_000_000


class _LostAnswers(FaultyStore):
    """The store of a process that is lost just before it keeps the answer of a request."""

    async def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        writes = [write for change in changes for write in change.writes]
        if any(isinstance(w, Update) and w.values.get("response_status") for w in writes):
            raise Unavailable("lost")
        return await super().commit(changes)


async def _send_twice(world: World, path: str, body: Any = None) -> tuple[Seen, Seen]:
    """To a process that is lost before it answers, and again, with the same key, to another."""
    store = _LostAnswers(world.env.store, Fault(NEVER, When.BEFORE))
    dead = world.seen_through(replace(world.env, store=store))
    headers = {"Idempotency-Key": "again"}
    lost = await dead.call("POST", path, body, headers=headers)
    world.clock.advance(limits.IDEMPOTENCY_CLAIM_S + 1)
    return lost, await world.call("POST", path, body, headers=headers)


async def test_a_submit_that_used_up_a_quota_and_was_lost_is_finished_under_its_key() -> None:
    world = _world(live_runs=1, stored_tasks=3, open_jobs=1)
    lost, again = await _send_twice(world, "/v1/jobs", _list(3, status="open"))

    assert (lost.status, again.status) == (503, 201)
    listed = await world.get("/v1/jobs")
    assert [job["job_id"] for job in listed.json["jobs"]] == [again.json["job_id"]]
    assert _is_refused(await _submit(world), "live_runs")


async def test_a_list_that_used_up_a_quota_and_was_lost_is_finished_under_its_key() -> None:
    world = _world(stored_tasks=3)
    job_id = (await _submit(world, 1, status="open")).json["job_id"]
    lost, again = await _send_twice(world, f"/v1/jobs/{job_id}/tasks", _list(2))

    assert (lost.status, again.status) == (503, 200)
    run = (await world.get(f"/v1/jobs/{job_id}")).json["latest_run"]
    assert run["stats"]["total"] == 3


async def test_a_rerun_that_used_up_a_quota_and_was_lost_is_finished_under_its_key() -> None:
    world = _world(live_runs=1)
    job_id = (await _submit(world)).json["job_id"]
    await world.call("POST", f"/v1/jobs/{job_id}/stop")
    lost, again = await _send_twice(world, f"/v1/jobs/{job_id}/rerun")

    assert (lost.status, again.status) == (503, 201)
    assert len((await world.get(f"/v1/jobs/{job_id}/runs")).json["runs"]) == 2


async def test_a_slot_that_used_up_a_quota_and_was_lost_is_finished_under_its_key() -> None:
    world = _world(upload_slots=1)
    lost, again = await _send_twice(world, "/v1/job_inputs", {"format": "text"})

    assert (lost.status, again.status) == (503, 201)
    assert _is_refused(
        await world.call("POST", "/v1/job_inputs", {"format": "text"}), "upload_slots"
    )


async def test_an_export_that_used_up_a_quota_and_was_lost_is_finished_under_its_key() -> None:
    world = _world(exports_per_run=1)
    job_id = (await _submit(world)).json["job_id"]
    await world.call("POST", f"/v1/jobs/{job_id}/stop")
    run_id = (await world.get(f"/v1/jobs/{job_id}")).json["latest_run"]["run_id"]
    path = f"/v1/jobs/{job_id}/runs/{run_id}/exports"
    lost, again = await _send_twice(world, path)

    assert (lost.status, again.status) == (503, 202)
    assert (await world.get(f"{path}/{again.json['export_id']}")).status == 200
    assert _is_refused(await world.call("POST", path), "exports_per_run")


@dataclass(frozen=True, slots=True)
class _LostReleases:
    """The coordinator of a process that is lost before it gives its leases back."""

    inner: Coordinator

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        del lease_ids


async def test_the_turn_of_a_lost_process_is_over_before_the_next_request_stops_waiting(
    autojump_clock: MockClock,
) -> None:
    world = _world()
    coordinator = cast("Coordinator", _LostReleases(world.env.coordinator))
    dead = world.seen_through(replace(world.env, coordinator=coordinator))
    assert (await dead.call("POST", "/v1/job_inputs", {"format": "text"})).status == 201

    held = await world.call("POST", "/v1/job_inputs", {"format": "text"})
    world.clock.advance(TURN_S)
    taken = await world.call("POST", "/v1/job_inputs", {"format": "text"})

    assert (held.status, taken.status) == (409, 201)
    assert held.headers["Retry-After"] == "1"


async def test_requests_are_limited_by_caller(autojump_clock: MockClock) -> None:
    world = _world(requests_per_s=2)
    statuses = [(await world.get("/v1/jobs")).status for _ in range(11)]
    assert statuses == [200] * 10 + [429]

    assert (await world.get("/v1/jobs", key=BERT)).status == 200
    assert (await world.get("/healthz")).status == 200
    await trio.sleep(0.5)
    assert (await world.get("/v1/jobs")).status == 200


async def test_tests_of_webhooks_are_limited() -> None:
    world = _world(webhook_tests_per_min=3)
    body = {"url": "https://example.com/hook"}
    seen = [await world.call("POST", "/v1/webhook/test", body) for _ in range(4)]

    assert [response.status for response in seen[:3]] == [200] * 3
    assert _is_refused(seen[3], "webhook_tests_per_min")
    assert len(world.receiver.heard) == 3


async def test_the_quotas_show_limits_and_use_and_metrics_count_refusals() -> None:
    world = _world(live_runs=2, stored_bytes=None)
    await _submit(world, 3, status="open")
    await _submit(world, 4)
    await _submit(world)

    quotas = {quota["name"]: quota for quota in (await world.get("/v1/quotas")).json["quotas"]}

    assert quotas["live_runs"] == {"name": "live_runs", "limit": 2, "used": 2}
    assert quotas["open_jobs"]["used"] == 1
    assert quotas["stored_tasks"]["used"] == 7
    assert quotas["stored_bytes"]["limit"] is None
    assert set(quotas) == set(Quota)
    refusals = world.metrics.registry.get_sample_value(
        "conveyor_quota_refusals_total", {"quota": "live_runs"}
    )
    assert refusals == 1


def test_streams_and_audits_are_limited_and_given_back() -> None:
    limits = {**DEFAULTS, Quota.STREAMS: 1, Quota.ADDRESS_STREAMS: 2}
    quotas = RequestQuotas(limits, counts_addresses=True)
    callers = [CallerId(name) for name in "abc"]
    first, second = (quotas.hold_stream(caller, "192.0.2.1") for caller in callers[:2])

    with pytest.raises(QuotaExceeded, match="streams"):
        quotas.hold_stream(callers[0], "192.0.2.9")
    with pytest.raises(QuotaExceeded, match="address_streams"):
        quotas.hold_stream(callers[2], "192.0.2.1")
    first.release()
    second.release()
    del second
    quotas.hold_stream(callers[0], "192.0.2.1").release()
    with quotas.hold_audit(callers[0]), quotas.hold_audit(callers[1]):
        for caller in (callers[0], callers[2]):
            with pytest.raises(QuotaExceeded, match="audits"), quotas.hold_audit(caller):
                pass
    with quotas.hold_audit(callers[0]):
        pass


async def test_pages_of_results_are_read_in_turn_and_no_caller_takes_the_turns_of_others(
    autojump_clock: MockClock,
) -> None:
    quotas = RequestQuotas(DEFAULTS)
    reading: Counter[CallerId] = Counter()
    most: Counter[CallerId] = Counter()
    ended_at: dict[CallerId, float] = {}

    async def read(caller: CallerId) -> None:
        async with quotas.turn_to_page(caller):
            reading[caller] += 1
            most[caller] = max(most[caller], reading[caller])
            assert reading.total() <= PAGES_MAX
            await trio.sleep(1.0)
            reading[caller] -= 1
        ended_at[caller] = trio.current_time()

    greedy, small = CallerId("greedy"), CallerId("small")
    started_at = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(read, greedy)
        await wait_all_tasks_blocked()
        nursery.start_soon(read, small)

    assert most == {greedy: CALLER_PAGES_MAX, small: 1}
    assert ended_at[small] - started_at <= 2.0
    assert quotas._caller_pages == {}


async def test_one_address_is_not_any_number_of_callers(autojump_clock: MockClock) -> None:
    quotas = RequestQuotas({Quota.ADDRESS_CALLERS: 2}, counts_addresses=True)
    for name in "aba":
        quotas.admit_request(CallerId(name), "192.0.2.1")

    with pytest.raises(QuotaExceeded, match="address_callers"):
        quotas.admit_request(CallerId("c"), "192.0.2.1")
    quotas.admit_request(CallerId("c"), "192.0.2.2")
    await trio.sleep(3700)
    quotas.admit_request(CallerId("c"), "192.0.2.1")


@pytest.mark.parametrize(
    ("address", "counted"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("<local>", None),
        (None, None),
    ],
)
def test_an_ipv6_client_counts_by_its_network(address: str | None, counted: str | None) -> None:
    assert group_address(address) == counted


@pytest.mark.parametrize("line", [b'{"url":""}', b"{}", b'{"url":"ftp://a.b/c"}'])
async def test_a_short_request_does_not_become_a_large_list(line: bytes) -> None:
    world = make_world()
    body = b'{"on_invalid":"skip","tasks":[' + b",".join([line] * 20_000) + b"]}"
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    seen = await world.call("POST", "/v1/jobs", raw=gzip.compress(body), headers=headers)
    job_id = (await _submit(world, status="open")).json["job_id"]
    path = f"/v1/jobs/{job_id}/tasks"
    more = await world.call("POST", path, raw=gzip.compress(body), headers=headers)

    assert (seen.status, seen.code) == (413, "request_too_large")
    assert (more.status, more.code) == (413, "request_too_large")
    assert (await world.get(f"/v1/jobs/{job_id}")).json["latest_run"]["stats"]["total"] == 1


async def test_a_list_as_people_send_them_passes_compressed() -> None:
    world = make_world()
    tasks = [{"url": f"https://shop.example.com/product/{n * 7919 % 999_983}"} for n in range(3000)]
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    raw = gzip.compress(json.dumps({"tasks": tasks}).encode())

    assert (await world.call("POST", "/v1/jobs", raw=raw, headers=headers)).status == 201


def test_a_million_lines_without_compression_never_grow_too_much() -> None:
    check_growth(1_000_000 * len(b'{"url":"http://a.bc"},'), tasks_count=1_000_000, bad_count=0)
