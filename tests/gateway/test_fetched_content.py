"""What the gateway makes of plain and rendered pages, by the parameters of the SDK's examples."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from zenrows import ZenRowsClient

from tests.gateway.conftest import KEY, RunningGateway, needs_chromium
from tests.gateway.site import LocalSite, serve_site

pytestmark = pytest.mark.slow

PRODUCT = """<!doctype html><title>Mug</title><h1>Blue mug</h1><a href="/more">More</a>
<script type="application/ld+json">{"@type": "Product", "name": "Mug"}</script>"""
# Content only for a visitor that runs scripts, and a challenge for all others.
SHELL = """<!doctype html><title>Mug</title><div id="root"></div><script>
document.getElementById('root').innerHTML = '<h1>Blue mug</h1><p>In stock, and shipped today.</p>';
</script>"""
CHALLENGE = """<!doctype html><title>Just a moment...</title><p>Verifying you are human.</p>
<script>window._cf_chl_opt = {};
document.title = 'Mug'; document.body.innerHTML = '<h1>Blue mug</h1>'; window._cf_chl_opt = null;
document.querySelectorAll('script').forEach(script => script.remove());</script>"""
CONSENT = """<!doctype html><title>Shop</title><main>
<p>You must accept cookies to use this website.</p><button id="ok">OK</button></main>
<script>document.getElementById('ok').onclick = () => {
document.querySelector('main').innerHTML = '<h1>Blue mug</h1>'; };</script>"""


def html(text: str, status: int = 200) -> tuple[int, dict[str, str], bytes]:
    return status, {"Content-Type": "text/html; charset=utf-8"}, text.encode()


@pytest.fixture
def shop() -> Iterator[LocalSite]:
    pages = {
        "/product": html(PRODUCT),
        "/shell": html(SHELL),
        "/challenge": html(CHALLENGE),
        "/consent": html(CONSENT),
        "/refused": html(SHELL, 403),
        "/gone": html("<title>Page not found</title><h1>Page not found</h1>"),
        "/blocked": html("<title>Access denied</title><h1>Access denied</h1>"),
        "/data": (
            200,
            {"Content-Type": "application/json"},
            b'{"error": "your ip has been blocked"}',
        ),
        "/source": (200, {"Content-Type": "text/plain"}, SHELL.encode()),
    }
    with serve_site(pages) as site:
        yield site


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[ZenRowsClient]:
    with ZenRowsClient(KEY, base_url=gateway.url) as opened:
        yield opened


@pytest.mark.parametrize(
    "rendered", [{}, pytest.param({"js_render": "true"}, marks=needs_chromium)]
)
@pytest.mark.parametrize(
    ("params", "content_type", "body"),
    [
        ({"css_extractor": '{"links":"a @href"}'}, "application/json", '{"links":"/more"}'),
        ({"outputs": "headings"}, "application/json", '{"headings":["Blue mug"]}'),
        (
            {"autoparse": "true"},
            "application/json",
            '{"title":"Mug","json_ld":[{"@type":"Product","name":"Mug"}]}',
        ),
        (
            {"response_type": "markdown"},
            "text/markdown; charset=utf-8",
            "# Blue mug\n\n[More](/more)\n",
        ),
        (
            {"response_type": "plaintext", "must_contain": "<h1>"},
            "text/plain; charset=utf-8",
            "Mug\n\nBlue mug\n\nMore\n",
        ),
    ],
)
def test_plain_and_rendered_pages_are_extracted_alike(
    client: ZenRowsClient,
    shop: LocalSite,
    rendered: dict[str, str],
    params: dict[str, str],
    content_type: str,
    body: str,
) -> None:
    answer = client.get(f"{shop.url}/product", params={**rendered, **params})

    assert (answer.status_code, answer.text) == (200, body)
    assert answer.headers["Content-Type"] == content_type


@needs_chromium
def test_data_that_scripts_load_is_extracted(client: ZenRowsClient, shop: LocalSite) -> None:
    params = {
        "js_render": "true",
        "wait_for": ".product",
        "css_extractor": json.dumps({"names": ".product"}),
    }
    answer = client.get(f"{shop.url}/", params=params)

    assert answer.json()["names"][:2] == ["thing 0", "thing 1"]


@pytest.mark.parametrize(
    ("path", "params", "status", "code", "detail"),
    [
        ("/challenge", {}, 422, "RESP001", "page_challenge"),
        ("/consent", {}, 422, "RESP001", "page_consent"),
        ("/shell", {}, 422, "RESP001", "page_shell"),
        ("/gone", {}, 404, "RESP002", "page_soft_404"),
        ("/gone", {"mode": "auto"}, 404, "RESP002", "page_soft_404"),
        ("/product", {"must_contain": "green"}, 422, "RESP001", "must_contain_not_met"),
        ("/product", {"must_match": "gr[e]{2}n"}, 422, "RESP001", "must_match_not_met"),
        ("/product", {"min_bytes": "9999"}, 422, "RESP001", "min_bytes_not_met"),
        ("/logo.png", {"outputs": "links"}, 415, "RESP003", "not_html"),
        ("/product", {"outputs": "wishes"}, 400, "REQS004", "outputs may name"),
        ("/product", {"css_extractor": '{"a":"h1["}'}, 400, "REQS004", "selector"),
        ("/product", {"css_extractor": "h1"}, 400, "REQS004", "object"),
        ("/product", {"must_match": "("}, 400, "REQS004", "RE2"),
        ("/product", {"outputs": "links", "autoparse": "true"}, 400, "REQS004", "combined"),
        ("/product", {"mode": "auto", "js_render": "true"}, 400, "REQS004", "by itself"),
        ("/product", {"extract": "auto"}, 400, "REQS004", "extract"),
    ],
)
def test_what_is_no_page_is_told_apart(
    client: ZenRowsClient,
    shop: LocalSite,
    path: str,
    params: dict[str, str],
    status: int,
    code: str,
    detail: str,
) -> None:
    answer = client.get(f"{shop.url}{path}", params=params)

    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert detail in answer.json()["detail"]


@needs_chromium
@pytest.mark.parametrize(
    "form", [{"response_type": "pdf"}, {"screenshot": "true"}, {"json_response": "true"}]
)
def test_a_picture_or_pdf_of_a_refusal_is_no_success(
    client: ZenRowsClient, shop: LocalSite, form: dict[str, str]
) -> None:
    refused = client.get(f"{shop.url}/blocked", params={"js_render": "true", **form})
    unmet = {"js_render": "true", "must_contain": "green", **form}
    other = client.get(f"{shop.url}/product", params=unmet)
    met = client.get(f"{shop.url}/product", params={**unmet, "must_contain": "Blue mug"})

    assert (refused.status_code, refused.json()["code"]) == (422, "RESP001")
    assert "page_blocked" in refused.json()["detail"]
    assert "must_contain_not_met" in other.json()["detail"]
    assert met.status_code == 200


@needs_chromium
@pytest.mark.parametrize("path", ["/data", "/source"])
def test_what_a_browser_makes_of_data_is_not_judged_as_a_page(
    client: ZenRowsClient, shop: LocalSite, path: str
) -> None:
    plain = client.get(f"{shop.url}{path}")
    rendered = client.get(f"{shop.url}{path}", params={"js_render": "true"})

    assert plain.content == shop.pages[path][2]
    assert rendered.status_code == 200
    assert rendered.headers["Content-Type"] == "text/html; charset=utf-8"
    for answer in (plain, rendered):
        assert answer.headers["Zr-Content-Type"] == shop.pages[path][1]["Content-Type"]


@needs_chromium
@pytest.mark.parametrize(
    "form", [{"response_type": "pdf"}, {"screenshot": "true"}, {"json_response": "true"}]
)
def test_a_download_has_no_picture(
    client: ZenRowsClient, shop: LocalSite, form: dict[str, str]
) -> None:
    answer = client.get(f"{shop.url}/file", params={"js_render": "true", **form})

    assert (answer.status_code, answer.json()["code"]) == (415, "RESP003")


@needs_chromium
@pytest.mark.parametrize("path", ["/shell", "/challenge"])
def test_auto_renders_what_a_plain_fetch_does_not_get(
    client: ZenRowsClient, shop: LocalSite, path: str
) -> None:
    params = {"mode": "auto", "css_extractor": '{"title":"h1"}', "must_contain": "Blue mug</h1>"}
    answer = client.get(f"{shop.url}{path}", params=params)

    assert (answer.status_code, answer.text) == (200, '{"title":"Blue mug"}')
    assert shop.paths().count(path) == 2


def test_auto_renders_nothing_that_a_plain_fetch_gets(
    client: ZenRowsClient, shop: LocalSite
) -> None:
    answer = client.get(f"{shop.url}/product", params={"mode": "auto"})

    assert (answer.status_code, answer.text) == (200, PRODUCT)
    assert shop.paths() == ["/product"]


@needs_chromium
def test_a_consent_wall_is_passed_by_instructions(client: ZenRowsClient, shop: LocalSite) -> None:
    params = {
        "mode": "auto",
        "js_instructions": json.dumps([{"click": "#ok"}, {"wait_for": "h1"}]),
        "css_extractor": '{"title":"h1"}',
    }
    answer = client.get(f"{shop.url}/consent", params=params)

    assert (answer.status_code, answer.text) == (200, '{"title":"Blue mug"}')
    assert shop.paths().count("/consent") == 1


def test_a_status_that_the_caller_allows_is_a_page(client: ZenRowsClient, shop: LocalSite) -> None:
    answer = client.get(f"{shop.url}/refused", params={"allowed_status_codes": "403"})

    assert (answer.status_code, answer.text) == (403, SHELL)
