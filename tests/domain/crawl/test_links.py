"""The links that are found in pages and sitemaps."""

from __future__ import annotations

import gzip

import pytest

from conveyor.domain.crawl.links import (
    LINKS_MAX,
    SITEMAP_BYTES_MAX,
    Reading,
    find_links,
    read_page,
    read_sitemap,
)
from conveyor.domain.crawl.urls import LinkFilter

SITE = LinkFilter("example.com")
URL = "http://example.com/a/"


def read(
    body: str | bytes,
    *,
    content_type: str = "text/html",
    final_url: str | None = None,
    is_markdown: bool = False,
    follows_canonical: bool = True,
) -> Reading:
    return read_page(
        URL,
        body if isinstance(body, bytes) else body.encode(),
        content_type,
        final_url,
        SITE,
        is_markdown=is_markdown,
        follows_canonical=follows_canonical,
    )


@pytest.mark.parametrize(
    "text",
    [
        "<a href='x'>",
        '<A class="a>b" HREF = "x">',
        "<a href=x>",
        "<a\nhref='x'\n>",
        "<map><area href=x></map>",
        "<!-- <a href=y> --><a href=x>",
        "<script>'<a href=y>'</script><a href=x>",
        "<STYLE>a{}<a href=y></style ><a href=x>",
        "<title><a href=y></title><a href=x>",
        "<abbr href=y><a href=x>",
        "<a href='x' href='y'>",
        "<a title='>' href=x>",
        "<a href=x><a href='unended",
    ],
)
def test_links_are_found_as_a_browser_finds_them(text: str) -> None:
    assert find_links(text).links == ("x",)


@pytest.mark.parametrize(
    "text",
    [
        "<!--" * 200_000,
        "<a " * 300_000,
        "<a href='" * 200_000,
        '<a "' * 200_000 + "'",
        "<script>" * 200_000,
        "<a href=x" + " =" * 300_000,
        "<a " + "x " * 300_000,
        "[" * 500_000 + "](",
    ],
)
def test_the_time_to_read_a_hostile_page_is_linear_in_its_length(text: str) -> None:
    find_links(text)
    read(text, is_markdown=True)


def test_each_link_of_a_page_is_found_once_and_only_within_the_site() -> None:
    on_site = ["b", "b#x", "/a/b?", "./", "http://www.example.com/c"]
    text = "".join(f"<a href='{link}'>" for link in [*on_site, "http://x.example/", "p.png"])

    assert read(text) == Reading(links=("http://example.com/a/b", "http://www.example.com/c"))


def test_links_are_resolved_against_the_base_element() -> None:
    assert read("<base href='/z/'><a href=b>").links == ("http://example.com/z/b",)


def test_entities_and_charsets_of_links_are_decoded() -> None:
    body = "<a href='/é?x=1&amp;y=2'>".encode("latin-1")

    assert read(body, content_type="text/html; charset=ISO-8859-1").links == (
        "http://example.com/%C3%A9?x=1&y=2",
    )
    assert read(body, content_type="text/html; charset=unknown").links != ()


@pytest.mark.parametrize("charset", ["idna", "punycode", "undefined", "base64", "no-such"])
def test_a_page_with_an_unusable_charset_is_read_as_utf_8(charset: str) -> None:
    body = b'<p>\xe9</p><a href="/b">'

    assert read(body, content_type=f"text/html; charset={charset}").links == (
        "http://example.com/b",
    )


def test_a_redirected_page_is_a_duplicate_of_its_final_url() -> None:
    assert read("<a href=b>", final_url="http://example.com/n?b=1&a=2") == Reading(
        moved_to="http://example.com/n?a=2&b=1"
    )
    assert read("<a href=b>", final_url="http://x.example/") == Reading(moved_to="")
    assert read("<a href=b>", final_url=URL + "#x").moved_to is None


def test_a_page_is_a_duplicate_of_its_canonical_link_within_the_site() -> None:
    head = "<link rel='alternate canonical' href='{}'><a href=b>"

    assert read(head.format("/c")) == Reading(moved_to="http://example.com/c")
    assert read(head.format("/a/?utm_source=x")).moved_to is None
    assert read(head.format("http://x.example/")).moved_to is None
    assert read(head.format("/c"), follows_canonical=False).links == ("http://example.com/a/b",)


def test_markdown_has_links_but_its_images_are_no_links() -> None:
    text = "[one](/x) ![image](/i) [two](<http://example.com/y> 'title') [three] (/z)"

    assert read(text, content_type="text/markdown", is_markdown=True).links == (
        "http://example.com/x",
        "http://example.com/y",
    )


def test_a_body_that_is_not_html_has_no_links() -> None:
    assert read("<a href=b>", content_type="application/json") == Reading()


SITEMAP = """<?xml version="1.0"?><urlset xmlns:image="x">
<url><loc> http://example.com/1?a=1&amp;b=2 </loc><image:loc>http://example.com/i</image:loc></url>
<url><loc><![CDATA[http://example.com/2]]></loc></url><url><loc>http://x.example/3</loc></url>
</urlset>"""


@pytest.mark.parametrize("body", [SITEMAP.encode(), gzip.compress(SITEMAP.encode())])
def test_a_sitemap_is_read_plain_and_compressed(body: bytes) -> None:
    reading = read_sitemap("http://example.com/s.xml", body, SITE)

    assert reading == Reading(links=("http://example.com/1?a=1&b=2", "http://example.com/2"))


def test_a_sitemap_index_names_sitemaps_and_a_url_set_names_pages() -> None:
    index = (
        b"<sitemapindex><sitemap><loc>http://example.com/s1.xml.gz</loc></sitemap></sitemapindex>"
    )

    assert read_sitemap("http://example.com/s", index, SITE) == Reading(
        sitemaps=("http://example.com/s1.xml.gz",)
    )
    assert read_sitemap("http://example.com/s", b"http://example.com/1\nnot a url\n", SITE).links


def test_a_sitemap_that_inflates_without_end_is_read_up_to_its_limit() -> None:
    line = b"http://example.com/1\n"
    bomb = gzip.compress(line * (SITEMAP_BYTES_MAX // len(line) + 100), compresslevel=1)

    assert read_sitemap("http://example.com/s", bomb, SITE).links == ("http://example.com/1",)
    assert read_sitemap("http://example.com/s", b"\x1f\x8bno gzip", SITE) == Reading()


def test_the_links_of_a_page_are_cut_at_the_maximum() -> None:
    text = "".join(f"<a href={number}>" for number in range(LINKS_MAX + 5))

    assert len(read(text).links) == LINKS_MAX
