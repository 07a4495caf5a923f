"""Lists of pages in every form, the names of their files, and the progress display."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from click.testing import CliRunner

from conveyor.cli.scrape.command import headers_from, scrape
from conveyor.cli.scrape.display import Seen, plain_line, render, unstyled
from conveyor.cli.scrape.inputs import BadList, InputOptions, find_duplicates, read_pages
from conveyor.cli.scrape.page_writer import BadPattern, check_pattern, make_namer
from conveyor.cli.scrape.pages import Page, fingerprint
from conveyor.config import Settings
from conveyor.domain.submit.scraper_params import DIRECT_SUPPORT
from conveyor.domain.submit.target import TargetPolicy

PUBLIC = TargetPolicy()


def pages_in(path: Path, content: str | bytes, **options: str) -> list[Page]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    given = InputOptions(
        url_column=options.get("url_column"),
        id_column=options.get("id_column"),
        delimiter=options.get("delimiter"),
    )
    return read_pages([str(path)], given, PUBLIC, DIRECT_SUPPORT).pages


def test_a_line_with_a_parameter_that_needs_a_gateway_is_a_flaw(tmp_path: Path) -> None:
    text = '{"url": "https://a.example/1", "zenrows_params": {"js_render": true}}\n'

    (page,) = pages_in(tmp_path / "list.ndjson", text)

    assert page.flaw == "unsupported_param: js_render"


def test_a_csv_column_is_found_by_its_name(tmp_path: Path) -> None:
    text = "sku,url\n1,https://a.example/1\n2,https://a.example/2\n"

    found = pages_in(tmp_path / "list.csv", text, id_column="sku")

    assert [(page.url, page.id) for page in found] == [
        ("https://a.example/1", "1"),
        ("https://a.example/2", "2"),
    ]


def test_a_header_makes_a_list_csv_whose_name_says_nothing(tmp_path: Path) -> None:
    table = "sku\tLink\n1\thttps://a.example/1\n"

    (page,) = pages_in(tmp_path / "list", table, id_column="sku")
    (alone,) = pages_in(tmp_path / "export", "url\nhttps://a.example/2\n")
    (text,) = pages_in(tmp_path / "urls", "https://a.example/?url,link=3\n")

    assert (page.url, page.id) == ("https://a.example/1", "1")
    assert alone.url == "https://a.example/2"
    assert text.url == "https://a.example/?url,link=3"


def test_a_json_array_is_refused_with_the_way_to_lines(tmp_path: Path) -> None:
    with pytest.raises(BadList, match=r"is a JSON array. Give one object a line: jq -c '\.\[\]'"):
        pages_in(tmp_path / "list.json", '[{"url": "https://a.example/"}]')


def test_a_csv_column_may_be_named_by_name_or_number(tmp_path: Path) -> None:
    text = "sku;page\n1;https://a.example/1\n"

    named = pages_in(tmp_path / "a.csv", text, url_column="page")
    numbered = pages_in(tmp_path / "b.csv", text, url_column="2")

    assert [page.url for page in named] == [page.url for page in numbered]
    with pytest.raises(BadList, match="--url-column; there are: sku, page"):
        pages_in(tmp_path / "c.csv", text)


@pytest.mark.parametrize("option", ["url_column", "id_column"])
def test_a_csv_column_that_is_not_there_is_refused(tmp_path: Path, option: str) -> None:
    with pytest.raises(BadList, match="has 2 columns, and no column 3"):
        pages_in(tmp_path / "list.csv", "url,sku\nhttps://a.example/,1\n", **{option: "3"})


def test_cookies_follow_those_of_a_header() -> None:
    arguments = {"header": {"cookie": "a=1"}, "user_agent": None, "cookie": ("b=2", "c=3")}

    assert headers_from(arguments) == {"Cookie": "a=1; b=2; c=3"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-b", "session"], "'session' is not NAME=VALUE."),
        (["-H", "Host: a.example"], "--header may not set Host."),
        (["--budget", "5"], "'--budget': '5' is not credits=N or cost=N.NN."),
    ],
)
def test_a_bad_value_is_told_with_the_name_of_its_option(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    command = ["https://a.example/", "-o", str(tmp_path / "out"), *arguments]

    ended = CliRunner().invoke(scrape, command, obj=Settings())

    assert ended.exit_code == 2
    assert words in ended.output


def test_a_csv_without_a_header_and_gzip_is_read(tmp_path: Path) -> None:
    content = gzip.compress(b"x,https://a.example/1\ny,https://a.example/2\n")

    found = pages_in(tmp_path / "list.csv.gz", content)

    assert [page.url for page in found] == ["https://a.example/1", "https://a.example/2"]


def test_ndjson_has_requests_of_its_own(tmp_path: Path) -> None:
    text = (
        '{"url": "https://a.example/", "id": 7, "headers": {"X-A": "b"}, "body": {"q": 1}}\n'
        '"https://b.example/"\n'
        '{"url": "https://a.example/", "colour": "red"}\n'
    )

    found = pages_in(tmp_path / "list.ndjson", text)

    assert found[0] == Page(
        "https://a.example/",
        id="7",
        method="POST",
        headers={"X-A": "b"},
        body=b'{"q": 1}',
        content_type="application/json",
        line=1,
    )
    assert found[1].url == "https://b.example/"
    assert found[2].flaw is not None
    assert (found[2].line, "colour" in found[2].flaw) == (3, True)


def test_forbidden_targets_and_bad_urls_are_flaws_with_line_numbers(tmp_path: Path) -> None:
    found = pages_in(tmp_path / "list.txt", "# x\nhttp://10.0.0.1/\nnone\nhttps://a.example/\n")

    assert [(page.line, (page.flaw or "").partition(":")[0]) for page in found] == [
        (2, "forbidden_target"),
        (3, "malformed_url"),
        (4, ""),
    ]


def test_the_fingerprint_is_of_requests_and_their_order() -> None:
    one, two = Page("https://a.example/1", line=1), Page("https://a.example/2", line=2)

    assert fingerprint([one, two]) == fingerprint([Page(one.url, line=9), two])
    assert fingerprint([one, two]) != fingerprint([two, one])
    assert fingerprint([one]) != fingerprint([Page(one.url, headers={"a": "b"})])


def test_duplicates_are_equal_requests() -> None:
    pages = [
        Page("https://a.example/"),
        Page("https://a.example/", method="POST"),
        Page("x", flaw="bad"),
    ]

    assert find_duplicates([*pages, *pages]) == {3: 0, 4: 1}


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("{index}", "000005.html"),
        ("{host}/{path}", "a.example/x/y/z_q=1-000005.html"),
        ("{id}", "s_k_u-000005.html"),
        ("p-{index}", "p-000005.html"),
    ],
)
def test_names_follow_the_pattern(pattern: str, name: str) -> None:
    page = Page("https://a.example/x/../y%2fz?q=1", id="s/k u")

    check_pattern(pattern)

    assert make_namer(pattern)(5, page, "text/html") == name


def test_names_keep_the_letters_of_every_script_and_fit_into_a_file_system() -> None:
    page = Page("https://a.example/%E6%97%A5%E6%9C%AC/%C3%BC:1", id="\N{HIRAGANA LETTER A}" * 100)

    path = make_namer("{path}")(5, page, "text/html")
    name = make_namer("{id}")(5, page, "text/html")

    assert path == "\u65e5\u672c/\xfc_1-000005.html"
    assert name == "\N{HIRAGANA LETTER A}" * 40 + "-000005.html"


@pytest.mark.parametrize("pattern", ["{host}", "page", "{colour}", "{index"])
def test_a_pattern_that_cannot_name_pages_is_refused(pattern: str) -> None:
    with pytest.raises(BadPattern):
        check_pattern(pattern)


SEEN = Seen(
    total=10_000,
    done=4_321,
    failures=[("target_404", 8), ("timeout", 4)],
    size_bytes=86_400_000,
    rate=1_234,
    bytes_rate=24_600_000,
    inflight=200,
    waits=["www.a-rather-long-name-of-a-host.example wants fewer requests: 12 s"],
    slow=["slow.example 3.2 s a page"],
    hanging=3,
    oldest_s=45,
    oldest_url="https://slow.example/a/page/with/a/long/path/that/does/not/fit/in/sixty/columns",
    elapsed_s=4,
)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_of_the_display_is_wider_than_the_terminal(width: int) -> None:
    lines = [unstyled(line) for line in render(SEEN, width)]

    assert max(map(len, lines)) <= width
    assert lines[0].startswith("4,321 of 10,000   43%")
    assert lines[2] == "12 failed: 8 target_404, 4 timeout"
    assert lines[-1].startswith("3 pages hang, the oldest for 45 s: https://slow")


def test_without_a_terminal_one_line_says_it_all() -> None:
    assert plain_line(SEEN) == (
        "Scraping: 4,321 of 10,000 done, 12 failed, 1,234 pages/s, 86.4 MB, 5 s left, waits: "
        "www.a-rather-long-name-of-a-host.example wants fewer requests: 12 s, "
        "3 hang, the oldest for 45 s"
    )
