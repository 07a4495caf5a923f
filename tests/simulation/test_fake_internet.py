"""Tests the receivers and the gateway of the simulated internet with the real clients."""

from __future__ import annotations

from random import Random
from typing import Any, cast

import pytest
from trio.testing import MockClock

from conveyor.domain.model import Webhook
from conveyor.domain.submit.target import TargetPolicy
from conveyor.engines.http.webhook import WebhookNotifier
from conveyor.engines.http.zenrows import ZenrowsGateway
from conveyor.ports.gateway import Deferred, NotScraped, Outcome, Scraped
from conveyor.ports.webhook_sender import Delivered, Message, NotDelivered
from conveyor.simulation.client_history import CURRENT_FETCH, Fetch
from conveyor.simulation.environment.fake_internet import GATEWAY_HOST, FakeInternet
from conveyor.simulation.environment.gateway import GatewayModel
from conveyor.simulation.faults.faults import Fault
from tests.builders import T0
from tests.engines.http.conftest import a_request
from tests.simulation.processes import faults_of_process

MESSAGE = Message(
    event_id="01HF0000000000000000000000",
    payload="{}",
    webhook=Webhook("https://a.hooks.example/hook", signature=False),
    partition="a caller",
    secrets=(),
)


def web_with(fault: Fault, seed: int = 1) -> FakeInternet:
    injector = faults_of_process(fault)
    return FakeInternet(
        injector=injector,
        faults=injector.faults,
        random=Random(seed),
        think_s=1.0,
        history=injector.monitor.history,
        monitor=injector.monitor,
        policy=TargetPolicy(),
        gateway=GatewayModel(
            plan=0,
            lies=False,
            random=Random(1),
            faults=injector.faults,
            history=injector.monitor.history,
        ),
    )


async def deliver(web: FakeInternet) -> Delivered | NotDelivered:
    return await WebhookNotifier(cast("Any", web), now=lambda: T0).deliver(MESSAGE)


async def test_a_webhook_does_not_follow_a_redirect_to_a_metadata_address(
    autojump_clock: MockClock,
) -> None:
    web = web_with(Fault.RECEIVER_TO_METADATA)

    assert await deliver(web) == NotDelivered("http_3xx:302", 302)
    assert len(web.history.deliveries) == 1


async def test_a_large_response_of_a_receiver_is_accepted(autojump_clock: MockClock) -> None:
    assert await deliver(web_with(Fault.RECEIVER_TOO_LARGE)) == Delivered(204)


@pytest.mark.parametrize("seed", range(10))
async def test_a_slow_receiver_records_a_delivery_only_if_its_response_arrived(
    seed: int, autojump_clock: MockClock
) -> None:
    web = web_with(Fault.RECEIVER_DRIPPED, seed)

    outcome = await deliver(web)

    statuses = [delivery.status for delivery in web.history.deliveries]
    assert (outcome, statuses) in [(Delivered(204), [None, 204]), (NotDelivered("timeout"), [None])]


@pytest.mark.parametrize(("allowed", "kind"), [("404", Scraped), ("500", NotScraped)])
async def test_the_gateway_bills_a_page_with_an_allowed_status(
    allowed: str, kind: type[Outcome], autojump_clock: MockClock
) -> None:
    web = web_with(Fault.SITE_NOT_FOUND)
    fetch = Fetch(process="worker", run_id="r", task_id="t", claim_id="1", started_at=0.0)
    gateway = ZenrowsGateway(cast("Any", web), f"https://{GATEWAY_HOST}/v1/", now=lambda: T0)
    marker = CURRENT_FETCH.set(fetch)

    outcome = await gateway.scrape(
        a_request("https://a.example/", params={"allowed_status_codes": allowed})
    )
    CURRENT_FETCH.reset(marker)

    assert isinstance(outcome, kind)
    assert not isinstance(outcome, Deferred)
    assert outcome.credits == fetch.credits_billed == (1 if kind is Scraped else 0)
