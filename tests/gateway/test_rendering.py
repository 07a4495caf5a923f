"""Pages that need a browser, through the program as it is run (docs/gateway.md, Browsers)."""

from __future__ import annotations

import base64
import json

import httpx
import pytest

from tests.gateway.conftest import RunningGateway, needs_chromium
from tests.gateway.site import LocalSite, serve_site

pytestmark = [pytest.mark.slow, needs_chromium]


def test_a_rendered_page_has_what_its_script_fetched(
    gateway: RunningGateway, site: LocalSite
) -> None:
    plain = gateway.get(f"{site.url}/")
    rendered = gateway.render(f"{site.url}/")

    assert "thing 19" not in plain.text
    assert rendered.text.count('class="product"') == 20
    assert rendered.headers["content-type"] == "text/html; charset=utf-8"
    assert rendered.headers["zr-final-url"] == f"{site.url}/"


def test_wait_and_wait_for_return_what_appears_later(
    gateway: RunningGateway, site: LocalSite
) -> None:
    awaited = gateway.render(f"{site.url}/lazy", wait_for=".late")
    waited = gateway.render(f"{site.url}/lazy", wait="1500")
    invalid = gateway.render(f"{site.url}/lazy", wait_for="p[")

    assert 'class="late"' in awaited.text
    assert 'class="late"' in waited.text
    assert (invalid.status_code, invalid.json()["code"]) == (400, "REQS004")


def test_instructions_act_on_the_page_and_are_reported(
    gateway: RunningGateway, site: LocalSite
) -> None:
    steps = [
        {"wait_for": ".product"},
        {"click": "#more"},
        {"wait": 300},
        {"fill": ["#name", "Anna"]},
        {"check": "#agree"},
        {"select_option": ["#colour", "blue"]},
        {"evaluate": "document.title = document.getElementById('colour').value"},
        {"click": "#not-there"},
        {"scroll_to": "bottom"},
    ]

    answer = gateway.render(
        f"{site.url}/", js_instructions=json.dumps(steps), json_response="true"
    ).json()

    html, report = answer["html"], answer["js_instructions_report"]
    assert "lazy thing" in html
    assert "hello Anna" in html
    assert "<title>blue</title>" in html
    assert report["instructions_executed"] == len(steps)
    assert [line["success"] for line in report["instructions"]].index(False) == 7
    assert report["instructions_failed"] == 1
    (xhr,) = answer["xhr"]
    assert xhr["url"] == f"{site.url}/api/products"
    assert json.loads(xhr["body"])[0] == "thing 0"


def test_instructions_reach_into_frames_and_scroll(
    gateway: RunningGateway, site: LocalSite
) -> None:
    in_frame = [
        {"frame_wait_for": ["#inner", ".product"]},
        {"frame_fill": ["#inner", "#name", "Bob"]},
        {"frame_evaluate": ["#inner", "parent.document.title = said.textContent"]},
    ]

    framed = gateway.render(f"{site.url}/frame", js_instructions=json.dumps(in_frame))
    scrolled = gateway.render(
        f"{site.url}/lazy", js_instructions=json.dumps([{"scroll_y": 9000}, {"wait": 200}])
    )

    assert "<title>hello Bob</title>" in framed.text
    assert "the end was seen" in scrolled.text


def test_blocked_resources_are_not_requested(gateway: RunningGateway, site: LocalSite) -> None:
    gateway.render(f"{site.url}/", block_resources="image,stylesheet")

    assert "/shop.js" in site.paths()
    assert not {"/logo.png", "/shop.css"} & set(site.paths())


def test_pdf_and_screenshots(gateway: RunningGateway, site: LocalSite) -> None:
    pdf = gateway.render(f"{site.url}/", response_type="pdf")
    png = gateway.render(f"{site.url}/lazy", screenshot_fullpage="true")
    in_json = gateway.render(
        f"{site.url}/",
        json_response="true",
        screenshot_selector="h1",
        screenshot_format="jpeg",
        screenshot_quality="50",
    ).json()

    assert pdf.headers["content-type"] == "application/pdf"
    assert pdf.content.startswith(b"%PDF-")
    assert png.content.startswith(b"\x89PNG")
    assert int.from_bytes(png.content[20:24]) > 5000
    assert base64.b64decode(in_json["screenshot"]["data"]).startswith(b"\xff\xd8")
    assert in_json["screenshot"]["type"] == "image/jpeg"


def test_custom_headers_go_to_their_origin_alone(gateway: RunningGateway, site: LocalSite) -> None:
    with serve_site({"/seen": (200, {"Content-Type": "text/html"}, b"<p>seen</p>")}) as other:
        site.pages["/away"] = (302, {"Location": f"{other.url}/seen"}, b"")
        site.pages["/mixed"] = (
            200,
            {"Content-Type": "text/html"},
            f'<img src="/own"><img src="{other.url}/foreign">'.encode(),
        )
        query = {"apikey": "key-of-anna", "js_render": "true", "custom_headers": "true"}
        secret = {"X-Secret": "s3cret", "User-Agent": "anna's browser"}
        for path in ("/away", "/mixed"):
            httpx.get(
                gateway.url,
                params={**query, "url": site.url + path},
                headers=secret,
                timeout=60,
            ).raise_for_status()

        for path in ("/away", "/mixed", "/own"):
            assert site.headers_of(path)["x-secret"] == "s3cret"
            assert site.headers_of(path)["user-agent"] == "anna's browser"
        for path in ("/seen", "/foreign"):
            assert "x-secret" not in other.headers_of(path)


def test_contexts_share_nothing(gateway: RunningGateway, site: LocalSite) -> None:
    first = gateway.render(f"{site.url}/stored")
    second = gateway.render(f"{site.url}/stored")

    assert '<p id="before">null</p>' in first.text
    assert '<p id="before">null</p>' in second.text
    assert "cookie" not in site.headers_of("/stored")


def test_the_status_of_the_page_counts_as_without_a_browser(
    gateway: RunningGateway, site: LocalSite
) -> None:
    missing = gateway.render(f"{site.url}/missing")
    allowed = gateway.render(f"{site.url}/missing", allowed_status_codes="404")
    original = gateway.render(f"{site.url}/broken", original_status="true")
    moved = gateway.render(f"{site.url}/moved")

    assert (missing.status_code, missing.json()["code"]) == (404, "RESP002")
    assert (allowed.status_code, "nothing here" in allowed.text) == (404, True)
    assert (original.status_code, "it broke" in original.text) == (500, True)
    assert moved.headers["zr-final-url"] == f"{site.url}/"


def test_a_download_and_a_dialog_do_not_stop_the_call(
    gateway: RunningGateway, site: LocalSite
) -> None:
    file = gateway.render(f"{site.url}/file")
    alert = gateway.render(f"{site.url}/alert")

    assert file.content == b"PK the file"
    assert "went on" in alert.text
