"""Extraction: the documents that parameters make of a page, and pages that mean harm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import trio

from conveyor.gateway.extraction import pool as pool_module
from conveyor.gateway.extraction.document import (
    Document,
    NotExtracted,
    Source,
    check_selector,
    make_document,
)
from conveyor.gateway.extraction.pool import ExtractionPool, ExtractionTimedOut

PAGE = """<!doctype html><html><head><title>Blue Mug | Shop</title>
<meta name=description content="A mug"><meta property="og:title" content="Mug">
<meta property="og:image" content="/a.png"><meta property="og:image" content="/b.png">
<link rel="shortcut icon" href="/f.ico">
<script type="application/ld+json">{"@type":"Product","name":"Mug","offers":{"price":"9.99"}}
</script><script type="application/ld+json">{broken</script></head><body>
<nav><a href="/">Home</a><a href="/sale?x=@y" title=Sale>Sale</a></nav><h1>Blue  <b>Mug</b></h1>
<div itemscope itemtype="https://schema.org/Offer"><span itemprop=price>9.99</span></div>
<p>Write to sales@shop.example or <a href="mailto:Help@shop.example?subject=x">us</a>.
Call <a href="tel:+1-555-0100">us</a> or (555) 123-4567. #mugs</p><img src="/m.png" alt="A mug">
<table><tr><th>Size</th><th>Price</th></tr><tr><td>S</td><td>1</td></tr><tr><td>L</td><td>2</td></tr>
</table><script>var x = "no@script.example"</script><ul><li>one<li>two</ul>
<video src=v.mp4></video><audio src=/s.mp3></audio></body></html>"""
LATIN = "text/html; charset=iso-8859-1"
URL = "https://shop.example/mugs/blue"


def make(params: dict[str, str], page: str = PAGE) -> Document:
    return make_document(a_source(page.encode(), params))


def a_source(body: bytes, params: dict[str, str], content_type: str = "text/html") -> Source:
    return Source(body=body, content_type=content_type, url=URL, params=params, bytes_max=1_000_000)


def select(selector: str, page: str = PAGE) -> Any:
    document = make({"css_extractor": json.dumps({"value": selector})}, page)
    assert document.content_type == "application/json"
    return json.loads(document.body)["value"]


@pytest.mark.parametrize(
    ("selector", "value"),
    [
        ("h1", "Blue Mug"),
        ("li", ["one", "two"]),
        (".none", None),
        ("nav a @href", ["/", "/sale?x=@y"]),
        ("nav a@title", "Sale"),
        ("a[href*='@y'] @title", "Sale"),
        ("img @alt", "A mug"),
        ("img @missing", None),
        ("li:first-child", "one"),
        ("table tr:nth-of-type(2) td", ["S", "1"]),
        ("//h1/b", "Mug"),
        ("//img/@src", "/m.png"),
        ("(//li)[2]", "two"),
    ],
)
def test_a_selector_returns_text_or_an_attribute(selector: str, value: object) -> None:
    assert check_selector(selector) is None
    assert select(selector) == value


def test_xpath_has_no_functions_that_backtrack() -> None:
    with pytest.raises(NotExtracted) as caught:
        select("//h1[re:test(., '(a+)+$')]")

    assert caught.value.code == "invalid_param_value"


@pytest.mark.parametrize(
    "selector", ["h1[", "a >", "::", "//h1[", "x:y(", "", "//h1[x:y]", "//h1[. = $a]"]
)
def test_a_selector_that_cannot_be_used_is_named(selector: str) -> None:
    assert check_selector(selector)
    with pytest.raises(NotExtracted) as caught:
        select(selector)

    assert caught.value.code == "invalid_param_value"


def test_autoparse_returns_what_the_page_states_about_itself() -> None:
    document = make({"autoparse": "true"})

    data = json.loads(document.body)
    assert data["title"] == "Blue Mug | Shop"
    assert data["json_ld"] == [{"@type": "Product", "name": "Mug", "offers": {"price": "9.99"}}]
    assert data["microdata"] == [
        {"type": "https://schema.org/Offer", "properties": {"price": "9.99"}}
    ]
    assert data["opengraph"] == {"og:title": "Mug", "og:image": ["/a.png", "/b.png"]}
    assert data["metadata"]["description"] == "A mug"


def test_outputs_returns_each_kind_of_data_that_is_named() -> None:
    document = make({"outputs": "*"})

    data = json.loads(document.body)
    assert data.pop("metadata")["title"] == "Blue Mug | Shop"
    assert data == {
        "audios": ["https://shop.example/s.mp3"],
        "emails": ["help@shop.example", "sales@shop.example"],
        "favicon": "https://shop.example/f.ico",
        "hashtags": ["#mugs"],
        "headings": ["Blue Mug"],
        "images": ["https://shop.example/m.png"],
        "links": ["https://shop.example/", "https://shop.example/sale?x=@y"],
        "menus": [["Home", "Sale"]],
        "phone_numbers": ["+1-555-0100", "(555) 123-4567"],
        "tables": [
            {
                "dimensions": {"rows": 2, "columns": 2, "heading": True},
                "heading": ["Size", "Price"],
                "content": [{"Size": "S", "Price": "1"}, {"Size": "L", "Price": "2"}],
            }
        ],
        "videos": ["https://shop.example/mugs/v.mp4"],
    }


def test_outputs_returns_nothing_that_was_not_named() -> None:
    document = make({"outputs": "emails, links"})

    assert json.loads(document.body).keys() == {"emails", "links"}


def test_links_are_those_of_the_base_that_the_page_states() -> None:
    document = make({"outputs": "links"}, "<base href='https://cdn.example/x/'><a href=y>y</a>")

    assert json.loads(document.body) == {"links": ["https://cdn.example/x/y"]}


def test_markdown_has_the_structure_of_the_page() -> None:
    document = make({"response_type": "markdown"})

    text = document.body.decode()
    assert document.content_type == "text/markdown; charset=utf-8"
    assert "# Blue **Mug**" in text
    assert "[us](mailto:Help@shop.example?subject=x)" in text
    assert "| S | 1 |" in text
    assert "- one\n- two" in text
    assert "var x" not in text


def test_plain_text_is_what_a_reader_sees() -> None:
    document = make({"response_type": "plaintext"})

    text = document.body.decode()
    assert document.content_type == "text/plain; charset=utf-8"
    assert "\n\nBlue Mug\n\n" in text
    assert "Size Price\nS 1\nL 2" in text
    assert "var x" not in text
    assert "<" not in text


@pytest.mark.parametrize("page", ["", " ", "\x00", "plain", "<", "<!--", "<html", "<table><tr>"])
@pytest.mark.parametrize(
    "params",
    [
        {"css_extractor": '{"a": "p"}'},
        {"autoparse": "true"},
        {"outputs": "*"},
        {"response_type": "markdown"},
        {"response_type": "plaintext"},
    ],
)
def test_a_page_of_nearly_nothing_has_nearly_no_data(page: str, params: dict[str, str]) -> None:
    assert make(params, page).content_type


def test_the_charset_is_that_of_the_page() -> None:
    source = a_source("<p>Größe".encode("latin-1"), {"css_extractor": '{"a": "p"}'})

    document = make_document(msgspec.structs.replace(source, content_type=LATIN))

    assert json.loads(document.body) == {"a": "Größe"}


def test_nothing_is_extracted_from_an_image() -> None:
    with pytest.raises(NotExtracted) as caught:
        make_document(a_source(b"\x89PNG\r\n", {"outputs": "links"}, "image/png"))

    assert caught.value.code == "not_html"


def test_a_result_that_would_be_larger_than_a_body_may_be_is_refused() -> None:
    nested = "<div>x" * 2000

    with pytest.raises(NotExtracted) as caught:
        select("div", nested)

    assert caught.value.code == "too_large"


# In the processes.

AUTOPARSE = {"autoparse": "true"}
ORDINARY = a_source(b"<h1>x", {"css_extractor": '{"a": "h1"}'})


@pytest.fixture
def pool() -> Iterator[ExtractionPool]:
    pool = ExtractionPool(2)
    yield pool
    pool.close()


@pytest.fixture
def impatient() -> Iterator[ExtractionPool]:
    """One process, with a tenth of the processor time for a page."""
    pool = ExtractionPool(1, cpu_s=1)
    yield pool
    pool.close()


async def test_a_page_is_extracted_in_another_process(pool: ExtractionPool) -> None:
    source = a_source(PAGE.encode(), {"css_extractor": '{"title": "h1"}'})

    documents = [await pool.extract(source, deadline_s=60) for _ in range(3)]

    assert [json.loads(document.body) for document in documents] == [{"title": "Blue Mug"}] * 3
    assert documents[0] == make_document(source)


CSS = {"css_extractor": '{"a": "div div div", "b": ":has(> a)"}'}
JSON_LD = b'<script type="application/ld+json">'
HOSTILE: dict[str, tuple[bytes, dict[str, str]]] = {
    "deep": (b"<div>" * 50_000, CSS),
    "deep as markdown": (b"<div>" * 50_000, {"response_type": "markdown"}),
    "inline elements": (b"<b><a><i>x" * 5_000, {"response_type": "plaintext"}),
    "nested tables": (b"<table><tr><th>a" * 500, {"outputs": "tables"}),
    "huge attribute": (b"<a href='" + b"x" * 3_000_000 + b"'>y</a>", {"outputs": "links"}),
    "addresses without an end": (b"a@" * 500_000, {"outputs": "emails"}),
    "digits without an end": (b"+1 " * 300_000, {"outputs": "phone_numbers"}),
    "broken utf-8": (b"\xff\xfe\xfd<p>" * 10_000, {"response_type": "markdown"}),
    "items in a circle": (b"<i itemscope id=a itemref='a b'><p id=b itemref=a>" * 50, AUTOPARSE),
    "deep json": (JSON_LD + b"[" * 100_000 + b"</script>", AUTOPARSE),
    "entities": (b"<!DOCTYPE x [<!ENTITY a 'aa'><!ENTITY b '&a;&a;'>]><p>&b;", {"outputs": "*"}),
}


@pytest.mark.parametrize(("body", "params"), HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_page_has_an_outcome_and_the_next_page_too(
    impatient: ExtractionPool, body: bytes, params: dict[str, str]
) -> None:
    failure = None
    try:
        document = await impatient.extract(a_source(body, params), deadline_s=300)
    except NotExtracted as error:
        failure = error
    else:
        assert len(document.body) <= 1_000_000

    assert failure is None or failure.code in {"too_large", "not_extracted"}
    assert await impatient.extract(ORDINARY, deadline_s=300) == make_document(ORDINARY)


async def test_a_page_that_would_compute_for_ever_is_ended_by_its_process(
    impatient: ExtractionPool,
) -> None:
    selector = " ".join(["*"] * 40) + " + " + " ~ ".join(["*"] * 20)
    body = b"<p><i>" * 3_000 + b"<b></b>" * 30_000
    source = a_source(body, {"css_extractor": json.dumps({"a": selector})})

    with pytest.raises(NotExtracted) as caught:
        await impatient.extract(source, deadline_s=600)

    assert caught.value.code == "too_large"
    assert await impatient.extract(ORDINARY, deadline_s=300) == make_document(ORDINARY)


async def test_a_call_without_time_left_says_nothing_about_the_page(pool: ExtractionPool) -> None:
    with pytest.raises(ExtractionTimedOut):
        await pool.extract(a_source(PAGE.encode(), {"outputs": "*"}), deadline_s=0)


async def test_a_cancelled_call_leaves_no_process_in_an_unknown_state(pool: ExtractionPool) -> None:
    source = a_source(PAGE.encode(), {"css_extractor": '{"title": "h1"}'})
    other = a_source(b"<h1>Other", {"css_extractor": '{"title": "h1"}'})
    await pool.extract(source, deadline_s=60)

    with trio.CancelScope() as scope:
        scope.cancel()
        await pool.extract(source, deadline_s=60)
    document = await pool.extract(other, deadline_s=60)

    assert json.loads(document.body) == {"title": "Other"}


async def test_a_process_is_replaced_before_it_can_grow_without_end(
    pool: ExtractionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "PAGES_MAX", 2)
    source = a_source(PAGE.encode(), {"css_extractor": '{"title": "h1"}'})

    for _ in range(5):
        await pool.extract(source, deadline_s=60)

    assert [process.page_count for process in pool._idle] == [1]


async def test_the_memory_of_a_process_does_not_include_that_of_the_one_that_started_it(
    pool: ExtractionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "RSS_BYTES_MAX", 200_000_000)
    ballast = b"x" * 200_000_001
    source = a_source(PAGE.encode(), {"css_extractor": '{"title": "h1"}'})

    await pool.extract(source, deadline_s=60)

    assert [process.page_count for process in pool._idle] == [1]
    assert len(ballast) == 200_000_001
