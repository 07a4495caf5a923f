"""Tests the simulated gateway, storage outages, power cuts and late answers."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest
import trio
from trio.testing import MockClock

from conveyor.domain.submit.target import Target, parse_url
from conveyor.engines.aws.errors import AwsError, NoResponse
from conveyor.http_client.errors import BodyTooLarge, ConnectFailed
from conveyor.http_client.exchange import Request
from conveyor.ports.errors import StorageFull, Unavailable
from conveyor.simulation.backends.storage_outage import PIECE, storage_error
from conveyor.simulation.client_history import History
from conveyor.simulation.environment.gateway import GatewayModel
from conveyor.simulation.faults.faults import Fault, Faults
from conveyor.simulation.faults.power_cut import SyncLog
from conveyor.simulation.options import draw


def a_gateway(plan: int = 0, *, lies: bool = False) -> GatewayModel:
    faults = Faults({}, Random(1))
    return GatewayModel(plan=plan, lies=lies, random=Random(1), faults=faults, history=History())


def a_request(key: str = "one") -> Request:
    target = parse_url(f"https://gateway.example/v1/?url=https%3A%2F%2Fa.example%2F&apikey={key}")
    assert isinstance(target, Target)
    return Request(method="GET", target=target)


async def test_the_gateway_refuses_calls_beyond_the_plan_of_a_key_until_one_ends(
    autojump_clock: MockClock,
) -> None:
    gateway = a_gateway(plan=1)
    assert gateway.refuse(a_request()) is None
    with trio.move_on_after(1.0), gateway.occupy(a_request(), 10.0):
        await trio.sleep(5.0)  # The caller hangs up before the answer.

    refused = gateway.refuse(a_request())

    assert refused is not None
    assert refused.status == 429
    assert refused.header(b"concurrency-limit") == "1"
    assert refused.header(b"concurrency-remaining") == "0"
    assert gateway.refuse(a_request("other")) is None
    autojump_clock.jump(9.0)
    assert gateway.refuse(a_request()) is None


async def test_a_call_does_not_count_towards_the_plan_after_its_answer(
    autojump_clock: MockClock,
) -> None:
    gateway = a_gateway(plan=1)
    with gateway.occupy(a_request(), 100.0):
        assert gateway.refuse(a_request()) is not None
    assert gateway.refuse(a_request()) is None

    with pytest.raises(BodyTooLarge), gateway.occupy(a_request(), 100.0):
        raise BodyTooLarge("the caller reads no more of it")
    assert gateway.refuse(a_request()) is None


async def test_an_outage_affects_every_key_until_faults_are_switched_off() -> None:
    gateway = a_gateway()
    gateway.outage = Fault.GATEWAY_UNREACHABLE
    with pytest.raises(ConnectFailed):
        gateway.refuse(a_request())
    gateway.outage = Fault.GATEWAY_FAILING
    refused = gateway.refuse(a_request())
    assert refused is not None
    assert refused.status >= 500

    gateway.faults.stop_faults()

    assert gateway.refuse(a_request()) is None


async def test_a_lying_gateway_reports_varying_limits() -> None:
    honest, lying = a_gateway(plan=3), a_gateway(plan=3, lies=True)

    assert len({honest.page_headers(a_request()) for _ in range(50)}) == 1
    assert len({lying.page_headers(a_request()) for _ in range(50)}) > 3


def test_full_storage_can_be_read_and_a_storage_outage_does_not_affect_rows() -> None:
    full, missing = Fault.STORAGE_FULL, Fault.STORAGE_MISSING

    assert isinstance(storage_error(full, "blobs", "add"), StorageFull)
    assert storage_error(full, "blobs", "open") is None
    assert isinstance(storage_error(missing, "blobs", "open"), Unavailable)
    assert isinstance(storage_error(missing, "s3", "GetObject"), AwsError)
    assert isinstance(storage_error(missing, "s3", f"{PIECE}GetObject"), NoResponse)
    assert storage_error(missing, "store", "commit") is None
    assert storage_error(None, "blobs", "add") is None


def _write(path: Path, data: bytes, *, syncs: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, data)
    if syncs:
        os.fsync(descriptor)
    os.close(descriptor)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def test_a_power_cut_loses_unsynced_bytes_and_names(tmp_path: Path) -> None:
    log = SyncLog(str(tmp_path))
    with log.recording():
        _write(tmp_path / "whole", b"kept", syncs=True)
        _write(tmp_path / "torn", b"kept", syncs=True)
        _write(tmp_path / "torn", b" and lost", syncs=False)
        _write(tmp_path / "empty", b"lost", syncs=False)
        _sync_directory(tmp_path)
        _write(tmp_path / "nameless", b"synced", syncs=True)

    assert log.lose_unsynced() == 3

    left = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert left == {"whole": b"kept", "torn": b"kept", "empty": b""}


def test_an_unsynced_directory_is_lost_with_its_content(tmp_path: Path) -> None:
    log = SyncLog(str(tmp_path))
    inner = tmp_path / "inner"
    with log.recording():
        inner.mkdir()
        _write(inner / "body", b"synced", syncs=True)
        _sync_directory(inner)

    assert log.lose_unsynced() == 1
    assert list(tmp_path.iterdir()) == []


def test_some_seeds_draw_neighbours_and_the_others_are_unchanged() -> None:
    drawn = [draw(seed) for seed in range(200)]
    with_some = [options for options in drawn if options.conditions != type(options.conditions)()]

    assert 40 < len(with_some) < 120
    assert any(options.conditions.is_isolated for options in with_some)
    assert all(options.has_gateway for options in drawn if options.conditions.gateway_plan)
