"""`dev` and `scrape` start a gateway for pages that need a browser (docs/gateway.md)."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import trio

from conveyor.bootstrap.local_gateway import LocalGateway, add_renderer, find_support
from conveyor.config import settings_from
from conveyor.domain.budget import Price
from conveyor.domain.submit.scraper_params import InvalidParam
from conveyor.ports.gateway import Outcome, Scraped, ScrapeRequest
from tests.engines.http.conftest import a_request
from tests.gateway.conftest import needs_chromium
from tests.gateway.site import LocalSite

pytestmark = pytest.mark.slow


@needs_chromium
def test_scrape_renders_pages_in_a_browser_that_it_starts(tmp_path: Path, site: LocalSite) -> None:
    command = [sys.executable, "-m", "conveyor.cli.main", "scrape", f"{site.url}/"]
    options = ["-o", str(tmp_path / "out"), "--param", "js_render=true", "--ignore-robots"]

    environ = {**os.environ, "CONVEYOR_ALLOW_PRIVATE_TARGETS": "on"}
    done = subprocess.run(
        [*command, *options], env=environ, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    (page,) = (tmp_path / "out").glob("*.html")
    assert page.read_text().count('class="product"') == 20


@needs_chromium
async def test_the_gateway_starts_with_the_first_page_and_again_when_it_was_killed(
    site: LocalSite,
) -> None:
    local = LocalGateway.prepare(
        settings_from({"CONVEYOR_ALLOW_PRIVATE_TARGETS": "on"}), random.Random(1)
    )
    assert local is not None
    request = a_request(f"{site.url}/", params={"js_render": "true"}, deadline_s=120.0)

    with local.listener, add_renderer(_Unused(), local.settings, now=lambda: 0.0) as gateway:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(local.run)
            outcomes = [await gateway.scrape(request)]
            nursery.cancel_scope.cancel()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(local.run)
            outcomes.append(await gateway.scrape(request))
            nursery.cancel_scope.cancel()

    for outcome in outcomes:
        assert isinstance(outcome, Scraped)
        assert outcome.body.count(b'class="product"') == 20


def test_without_chromium_the_refusal_says_what_to_install() -> None:
    settings = settings_from({"CONVEYOR_CHROMIUM": "/nonexistent/chromium"})

    with pytest.raises(InvalidParam, match=r"conveyor\[browser\]"):
        find_support(settings).check({"js_render": "true"})
    assert LocalGateway.prepare(settings, random.Random(1)) is None


def test_parameters_of_a_line_count_with_those_of_its_job() -> None:
    settings = settings_from({"CONVEYOR_RENDERER_URL": "http://127.0.0.1:1/v1/?apikey=k"})
    support = find_support(settings)

    support.check({"wait_for": ".row"}, {"js_render": "true"})
    with pytest.raises(InvalidParam):
        support.check({"wait_for": ".row"})


@pytest.mark.parametrize(
    ("params", "job_params", "key"),
    [
        ({"js_render": "true", "wait": "31000"}, {}, "wait"),
        ({"wait": "31000"}, {"js_render": "true"}, "wait"),
        ({"js_render": "true", "js_instructions": '[{"dance": 1}]'}, {}, "js_instructions"),
        ({"js_render": "true", "block_resources": "wishes"}, {}, "block_resources"),
        ({"js_render": "true", "json_response": "perhaps"}, {}, "json_response"),
        ({"js_render": "true", "json_response": "true", "outputs": "*"}, {}, "json_response"),
        ({"response_type": "pdf"}, {"js_render": "1", "json_response": "1"}, "response_type"),
        ({"mode": "auto", "js_render": "true"}, {}, "mode"),
    ],
)
def test_what_every_page_would_be_refused_for_is_refused_before_the_first(
    params: dict[str, str], job_params: dict[str, str], key: str
) -> None:
    settings = settings_from({"CONVEYOR_RENDERER_URL": "http://127.0.0.1:1/v1/?apikey=k"})

    with pytest.raises(InvalidParam) as refusal:
        find_support(settings).check(params, job_params)

    assert (refusal.value.key, refusal.value.reason) == (key, "invalid_param_value")


class _Unused:
    """Stands for direct fetches, which are not made."""

    def price(self, params: Mapping[str, str]) -> Price:
        raise AssertionError

    async def scrape(self, request: ScrapeRequest) -> Outcome:
        raise AssertionError
