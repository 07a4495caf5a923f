"""Verdicts on the recorded pages: no block page is a success, and no ordinary page is blocked."""

from __future__ import annotations

import pytest

from conveyor.gateway.verdicts import MEANINGS, Verdict, judge, load_rules, read_content
from conveyor.ports.gateway import Page
from tests.gateway.recorded import CONTENT, NO_CONTENT, Recorded


def name_of(recorded: Recorded) -> str:
    return recorded.name


@pytest.mark.parametrize("recorded", NO_CONTENT, ids=name_of)
def test_no_recorded_page_without_content_is_taken_for_a_page(recorded: Recorded) -> None:
    finding = judge(recorded.to_page())

    assert finding is not None
    assert finding.verdict is recorded.verdict


TITLES = sorted({title for rule in load_rules() for title in rule.title})
PHRASES = sorted({text for rule in load_rules() for text in (*rule.text, *rule.either)})
# What a short page may be that has the title of a refusal.
ENTRIES = {
    "a film": "<h1>{name}</h1><p>A film of 1998 by Anna Berg. 94 minutes.</p>",
    "a song": "<h1>{name}</h1><p>By the Wanderers. 3:41</p>",
    "a dictionary": "<div>We use cookies. <button>Accept all</button></div><h1>{name}</h1>"
    '<p>noun, often in the plural. From Latin.</p><form><input type="search"></form>',
    "a product": '<h1>{name}</h1><img src="1.jpg"><p>Wooden toy, 19.90.</p><button>Buy</button>',
    "a stream": "<div>Cookies are stored in your browser.</div><h1>{name}</h1><p>Watch it in your "
    "browser or on your computer. I agree with the critics: not to be missed."
    '</p><a href="/">Home</a><a href="/help">Contact support</a><a href="/more">Continue</a>',
    "a protected site": "<h1>{name}</h1><p>A novel in three parts.</p>"
    "<script src='https://www.google.com/recaptcha/api.js?render=6L'></script>"
    "<script>a.src='/cdn-cgi/challenge-platform/scripts/jsd/main.js'</script>",
}


def a_page(html: str) -> Page:
    return Recorded(name="", html=f"<html>{html}</html>").to_page()


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
@pytest.mark.parametrize(
    "heading", ["{name}", "{name} | The Archive", "Archive: {name} - Entry 12"]
)
def test_no_title_alone_makes_a_page_no_content(heading: str, entry: str) -> None:
    refused = [
        (name, finding.rule)
        for name in TITLES
        if (finding := judge(a_page(f"<title>{heading}</title>{entry}".format(name=name))))
    ]

    assert refused == []


def test_no_phrase_makes_an_article_that_quotes_it_no_content() -> None:
    prose = "The mill stands where two streams meet, and is open on Sundays. " * 16
    refused = [
        (phrase, finding.rule)
        for phrase in PHRASES
        if (finding := judge(a_page(f"<title>Mills</title><h1>Mills</h1><p>{phrase}</p>{prose}")))
    ]

    assert refused == []


@pytest.mark.parametrize("recorded", CONTENT, ids=name_of)
def test_no_recorded_page_with_content_is_refused(recorded: Recorded) -> None:
    assert recorded.verdict is None
    assert judge(recorded.to_page()) is None


def test_the_recorded_set_is_as_large_as_the_document_says() -> None:
    assert len(NO_CONTENT) >= 165
    assert len(CONTENT) >= 190
    assert len({recorded.name for recorded in (*NO_CONTENT, *CONTENT)}) == len(NO_CONTENT) + len(
        CONTENT
    )


def test_each_verdict_has_a_recorded_page_and_a_meaning() -> None:
    assert {recorded.verdict for recorded in NO_CONTENT} == set(Verdict)
    assert MEANINGS.keys() == set(Verdict)


def test_rules_have_names_of_their_own_and_texts_in_lower_case() -> None:
    rules = load_rules()

    assert len({rule.name for rule in rules}) == len(rules)
    for rule in rules:
        for text in (*rule.title, *rule.markers, *rule.also, *rule.text, *rule.url, *rule.headers):
            assert text == text.lower(), rule.name


def test_only_hypertext_is_judged_by_what_it_contains() -> None:
    challenge = NO_CONTENT[1].to_page()
    as_text = Page(
        url=challenge.url,
        status=200,
        headers={},
        content_type="application/json",
        body=challenge.body,
    )

    assert judge(challenge) is not None
    assert judge(as_text) is None


def test_a_refusal_whose_body_was_not_read_is_judged_by_its_headers() -> None:
    page = Page(
        url="https://www.example.com/",
        status=503,
        headers={"cf-mitigated": "challenge"},
        content_type="text/html",
        body=b"",
    )

    finding = judge(page)

    assert finding is not None
    assert finding.verdict is Verdict.CHALLENGE


def test_scripts_styles_and_comments_are_no_visible_text() -> None:
    content = read_content(
        "<head><title>no</title></head><body>a<script>if (1<2) no</script>b<!-- <p>no -->c"
        "<style>no</style><noscript>no</noscript> &amp; <input type=hidden><input><img><p>d</p>"
    )

    assert content.text == "a b c & d"
    assert content.field_count == 1
    assert content.image_count == 1
    assert content.script_chars == len("if (1<2) no")


@pytest.mark.parametrize(
    "piece", ["<", "<!--", "<script>", "</script", "<a ", "<title", "a - ", "&amp", "<input type"]
)
def test_no_page_makes_reading_it_take_more_than_its_length(piece: str) -> None:
    # A reader that went over the rest of the page for each piece would never end here.
    read_content(piece * (2_000_000 // len(piece)))


def test_a_page_is_read_until_it_shows_more_text_than_any_rule_allows() -> None:
    text = "one two <b>three</b> " * 1_000

    content = read_content(f"<p>{text}</p><input><img><script>0</script>")

    assert 4_000 < len(content.text) < 10_000
    assert (content.field_count, content.image_count, content.script_chars) == (0, 0, 0)


@pytest.mark.parametrize("gap", [" " * 30_000, "<i class='x'></i>" * 3_000, "<!-- no -->" * 3_000])
def test_the_little_text_of_a_large_page_is_read_to_its_end(gap: str) -> None:
    content = read_content(f"<p>a &amp; b</p>{gap}<p>c &lt; d</p>{gap}<img>")

    assert content.text == "a & b c < d"
    assert content.image_count == 1
