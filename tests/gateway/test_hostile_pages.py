"""Pages that would keep a browser for ever, or show what no site sent: each call ends in time with
the code of its cause, and the next call gets its page (docs/gateway.md, Browsers)."""

from __future__ import annotations

import json
import socket

import pytest
import trio

from conveyor.domain.submit.target import TargetPolicy
from conveyor.gateway.browser import rendering
from conveyor.gateway.errors import CallFailed, Fault
from conveyor.gateway.guarding_proxy import GuardingProxy
from tests.gateway.browsers import a_rendering, running_pool
from tests.gateway.conftest import RunningGateway, needs_chromium
from tests.gateway.site import LocalSite

pytestmark = [pytest.mark.slow, needs_chromium]

TEXT = "<p>The mill stands where two streams meet, and is open on Sundays.</p>"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "LOAD_S", 5.0)
    monkeypatch.setattr(rendering, "ANSWER_S", 5.0)
    monkeypatch.setattr(rendering, "SCRIPT_S", 2.0)
    monkeypatch.setattr(rendering, "WAIT_FOR_S", 3.0)


def a_proxy() -> GuardingProxy:
    return GuardingProxy(TargetPolicy(allow_private=True))


@pytest.mark.parametrize(
    ("script", "params"),
    [
        ("for (;;);", {}),
        ("for (;;) alert(1)", {}),
        ("setTimeout(() => { for (;;); }, 20)", {}),
        ("setTimeout(() => { for (;;); }, 20)", {"screenshot": "true"}),
        ("(async () => { for (;;) await 0 })()", {}),
        ("location.reload()", {}),
        ("location = '/?' + Math.random()", {}),
        ("addEventListener('beforeprint', () => { for (;;); })", {"response_type": "pdf"}),
    ],
)
@pytest.mark.usefixtures("impatient")
async def test_a_page_whose_scripts_never_pause_fails_in_time(
    site: LocalSite, script: str, params: dict[str, str]
) -> None:
    site.pages["/loop"] = (
        200,
        {"Content-Type": "text/html"},
        f"{TEXT}<script>{script}</script>".encode(),
    )
    site.pages["/"] = site.pages["/loop"]
    async with running_pool(a_proxy(), pages_max=1) as pool:
        with trio.fail_after(40), pytest.raises(CallFailed) as caught:
            await pool.render(a_rendering(f"{site.url}/loop", params))

        assert caught.value.fault is Fault.TOO_SLOW
        page = await pool.render(a_rendering(f"{site.url}/stored"))
        assert page.status == 200
        assert pool.started_count == 1


@pytest.mark.usefixtures("impatient")
async def test_a_page_is_taken_without_the_image_that_never_arrives(site: LocalSite) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        image = f"<img src='http://127.0.0.1:{silent.getsockname()[1]}/'>"
        site.pages["/waits"] = (200, {"Content-Type": "text/html"}, (TEXT + image).encode())
        async with running_pool(a_proxy()) as pool:
            page = await pool.render(a_rendering(f"{site.url}/waits"))

    assert b"two streams" in page.body


@pytest.mark.usefixtures("impatient")
async def test_a_selector_is_not_awaited_for_ever_by_a_page_that_reloads(site: LocalSite) -> None:
    reloading = f"{TEXT}<script>setTimeout(() => location.reload(), 500)</script>"
    site.pages["/reloads"] = (200, {"Content-Type": "text/html"}, reloading.encode())
    async with running_pool(a_proxy()) as pool:
        with trio.fail_after(30), pytest.raises(CallFailed) as caught:
            await pool.render(a_rendering(f"{site.url}/reloads", {"wait_for": ".never"}))

    assert caught.value.fault is Fault.NO_CONTENT


@pytest.mark.usefixtures("impatient")
async def test_a_script_of_the_caller_that_does_not_end_fails_only_itself(site: LocalSite) -> None:
    steps = [
        {"evaluate": "for (;;);"},
        {"evaluate": "new Promise(() => {})"},
        {"evaluate": "document.title = 'went on'"},
    ]
    async with running_pool(a_proxy()) as pool:
        page = await pool.render(
            a_rendering(f"{site.url}/stored", {"js_instructions": json.dumps(steps)})
        )

    assert page.report is not None
    assert page.report.instructions is not None
    results = [line["success"] for line in page.report.instructions["instructions"]]
    assert results == [False, False, True]
    assert b"went on" in page.body


async def test_a_page_that_needs_too_much_memory_ends_without_its_neighbours(
    site: LocalSite,
) -> None:
    hungry = """<script>const kept = []; setInterval(() => {
        const block = new Uint8Array(50e6); block.fill(1); kept.push(block);
    }, 20)</script>"""
    site.pages["/hungry"] = (200, {"Content-Type": "text/html"}, (TEXT + hungry).encode())
    neighbours: list[bytes] = []
    async with running_pool(a_proxy(), memory_mb_max=400) as pool:

        async def render_beside() -> None:
            page = await pool.render(a_rendering(f"{site.url}/stored", {"wait": "15000"}))
            neighbours.append(page.body)
            assert ids == pool.browser_ids[:1]

        async with trio.open_nursery() as nursery:
            await pool.render(a_rendering(f"{site.url}/stored"))
            ids = pool.browser_ids
            nursery.start_soon(render_beside)
            await trio.sleep(0.5)
            with pytest.raises(CallFailed):
                await pool.render(a_rendering(f"{site.url}/hungry", {"wait": "30000"}))

    assert len(neighbours) == 1


@pytest.mark.parametrize(
    ("goal", "status", "code"),
    [
        ("about:blank", 422, "RESP001"),
        ("http://127.0.0.1:{closed}/", 422, "RESP001"),
        ("http://name.invalid/", 404, "RESP007"),
        ("http://169.254.169.254/", 400, "REQS001"),
        ("/missing", 404, "RESP002"),
    ],
)
def test_a_page_that_goes_on_to_no_page_is_no_success(
    gateway: RunningGateway, site: LocalSite, unused_port: int, goal: str, status: int, code: str
) -> None:
    address = goal.format(closed=unused_port)
    moving = f"{TEXT}<script>location = '{address}'</script>"
    site.pages["/moving"] = (200, {"Content-Type": "text/html"}, moving.encode())

    answer = gateway.render(f"{site.url}/moving")

    assert (answer.status_code, answer.json()["code"]) == (status, code)


@pytest.mark.parametrize(
    "way",
    [
        "<script>for (let i = 0; i < 50; i++) window.open('/popup')</script>",
        "<a id=b target=_blank href=/popup>b</a>",
        "<button id=b onclick=\"window.open('/popup', 'w', 'width=300')\">b</button>",
        "<form target=_blank action=/popup><button id=b>b</button></form>",
    ],
)
def test_a_page_that_opens_pop_ups_is_returned_and_none_of_them_is_loaded(
    gateway: RunningGateway, site: LocalSite, way: str
) -> None:
    site.pages["/opens"] = (200, {"Content-Type": "text/html"}, (TEXT + way).encode())
    steps = json.dumps([{"click": "#b"}, {"wait": 300}])

    answer = gateway.render(f"{site.url}/opens", js_instructions=steps)

    assert answer.status_code == 200
    assert "two streams" in answer.text
    assert "/popup" not in site.paths()


@pytest.mark.parametrize(
    "script",
    [
        "document.documentElement.remove()",
        "document.body.remove()",
        "addEventListener('load', () => document.open())",
        "addEventListener('load', () => { document.open(); document.close() })",
    ],
)
@pytest.mark.parametrize("params", [{}, {"json_response": "true"}, {"response_type": "pdf"}])
def test_a_page_that_removes_its_own_document_is_no_page(
    gateway: RunningGateway, site: LocalSite, script: str, params: dict[str, str]
) -> None:
    html = f"{TEXT}<script>{script}</script>"
    site.pages["/removed"] = (200, {"Content-Type": "text/html"}, html.encode())

    answer = gateway.render(f"{site.url}/removed", **params)
    allowed = gateway.render(f"{site.url}/removed", allowed_status_codes="200", **params)

    assert (answer.status_code, answer.json()["code"]) == (422, "RESP001")
    assert "page_shell" in answer.json()["detail"]
    assert allowed.status_code == 200


def test_an_attribute_that_calls_open_empties_the_document(
    gateway: RunningGateway, site: LocalSite
) -> None:
    # There, `open` is that of the document and not that of the window.
    html = f"{TEXT}<button id=b onclick=\"open('/popup')\">b</button>"
    site.pages["/opens"] = (200, {"Content-Type": "text/html"}, html.encode())

    answer = gateway.render(f"{site.url}/opens", js_instructions='[{"click": "#b"}]')

    assert (answer.status_code, answer.json()["code"]) == (422, "RESP001")


@pytest.mark.parametrize(
    "goal",
    [
        "file:///etc/passwd",
        "chrome://version",
        "view-source:about:blank",
        "data:text/html,x",
        "javascript:alert(1)",
        "mailto:anna@example.com",
    ],
)
@pytest.mark.parametrize(
    "way", ["<script>location = '{}'</script>", "<meta http-equiv=refresh content='0;url={}'>"]
)
def test_a_page_stays_where_it_is_if_it_may_not_go_on(
    gateway: RunningGateway, site: LocalSite, way: str, goal: str
) -> None:
    site.pages["/stays"] = (200, {"Content-Type": "text/html"}, (TEXT + way.format(goal)).encode())

    answer = gateway.render(f"{site.url}/stays")

    assert answer.status_code == 200
    assert "two streams" in answer.text
    assert answer.headers["zr-final-url"] == f"{site.url}/stays"


def test_bodies_in_any_charset_are_returned_as_text(
    gateway: RunningGateway, site: LocalSite
) -> None:
    shown = {
        "/latin1": ("text/html; charset=iso-8859-1", "café", "iso-8859-1"),
        "/sjis": ("text/html", "日本語", "shift_jis"),
        "/gbk": ("text/html; charset=gb2312", "中文页面", "gbk"),
        "/utf16": ("text/html; charset=utf-16le", "sechzehn é", "utf-16-le"),
    }
    for path, (kind, text, charset) in shown.items():
        html = f'<meta charset="{charset}"><h1>{text}</h1>{TEXT}'
        site.pages[path] = (200, {"Content-Type": kind}, html.encode(charset))
    site.pages["/invalid"] = (
        200,
        {"Content-Type": "text/html"},
        b"<h1>a\xff\xfe\xc3(b</h1>" + TEXT.encode(),
    )
    site.pages["/empty"] = (200, {"Content-Type": "text/html"}, b"")

    for path, (_, text, _) in shown.items():
        assert text in gateway.render(site.url + path).text
        extracted = gateway.get(site.url + path, css_extractor='{"heading": "h1"}')
        assert extracted.json() == {"heading": text}
    assert "two streams" in gateway.render(f"{site.url}/invalid").text
    assert gateway.get(f"{site.url}/invalid", response_type="plaintext").status_code == 200
    assert gateway.get(f"{site.url}/empty").status_code == 200
    assert gateway.render(f"{site.url}/empty").status_code == 422


@pytest.mark.parametrize("params", [{}, {"json_response": "true"}, {"autoparse": "true"}])
def test_half_a_surrogate_pair_in_a_page_ends_no_browser(
    gateway: RunningGateway, site: LocalSite, params: dict[str, str]
) -> None:
    script = """document.title = '\\ud800 title'; history.pushState(0, '', '/halves?\\udfff');
        fetch('/echo', {method: 'POST', body: '\\ud83d half'}); alert('\\udc00')"""
    site.pages["/halves"] = (
        200,
        {"Content-Type": "text/html"},
        f"{TEXT}<p>\U0001f600</p><script>{script}</script>".encode(),
    )

    answer = gateway.render(f"{site.url}/halves", **params)

    assert answer.status_code == 200
    assert "title" in answer.text
