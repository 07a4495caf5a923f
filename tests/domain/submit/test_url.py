"""The URL parser refuses what two parsers could read differently (SPEC.md 5.2)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.domain.submit.target import (
    BadUrl,
    Target,
    UrlReason,
    _parse_carefully,
    join,
    parse_url,
)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://example.com", "http://example.com/"),
        ("http://example.com/", "http://example.com/"),
        ("https://example.com/a/b?c=d&e=f", "https://example.com/a/b?c=d&e=f"),
        ("http://example.com?q", "http://example.com/?q"),
        ("http://example.com/a#fragment", "http://example.com/a"),
        ("http://example.com#@evil.com/", "http://example.com/"),
        ("HTTP://EXAMPLE.com/Path", "http://example.com/Path"),
        ("http://example.com:80/", "http://example.com/"),
        ("https://example.com:443/", "https://example.com/"),
        ("https://example.com:80/", "https://example.com:80/"),
        ("http://example.com:8080/a", "http://example.com:8080/a"),
        ("http://example.com./", "http://example.com/"),
        ("http://my_shop.example.com/", "http://my_shop.example.com/"),
        ("http://r3---sn-x.example.com/", "http://r3---sn-x.example.com/"),
        ("http://localhost/", "http://localhost/"),
        ("http://127.0.0.1:9/", "http://127.0.0.1:9/"),
        ("http://[::1]/", "http://[::1]/"),
        ("http://[2001:DB8:0:0::1]:81/", "http://[2001:db8::1]:81/"),
        ("http://straße.de/", "http://xn--strae-oqa.de/"),
        ("http://BÜCHER.example/", "http://xn--bcher-kva.example/"),
        ("http://xn--bcher-kva.example/", "http://xn--bcher-kva.example/"),
        ("http://example.com/é?q=ü", "http://example.com/%C3%A9?q=%C3%BC"),
        ("http://example.com/{a}|b", "http://example.com/%7Ba%7D%7Cb"),
        ("http://example.com/100%", "http://example.com/100%"),
        ("http://example.com/a/../b", "http://example.com/a/../b"),
        ("http://example.com/a?b=http://c.com/@d:e", "http://example.com/a?b=http://c.com/@d:e"),
    ],
)
def test_a_valid_url_is_normalised_to_one_spelling(text: str, url: str) -> None:
    target = parse_url(text)

    assert isinstance(target, Target)
    assert target.url == url


@pytest.mark.parametrize(
    "text",
    [
        "http://127.1/",
        "http://0/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://0x7f.1/",
        "http://0177.0.0.1/",
        "http://017700000001/",
        "http://127.0.0.1./",
        "http://127.0.0.256/",
        "http://1.2.3/",
        "http://example.123/",
        "http://example.0x1f/",
        "http://\uff11\uff12\uff17.0.0.1/",
        "http://①②⑦.0.0.1/",
        "http://127。0。0。1/",
        "http://\uff45xample.com/",
        "http://[fe80::1%25eth0]/",
        "http://[fe80::1%eth0]/",
        "http://[::1/",
        "http://[::1]x/",
        "http://[1::2::3]/",
        "http://[127.0.0.1]/",
        "http://a::1/",
        "http://user:pass@example.com/",
        "http://user@example.com/",
        "http://good.com@127.0.0.1/",
        "http://good.com\\@127.0.0.1/",
        "http://good.com:80@127.0.0.1:80/",
        "http://@example.com/",
        "http:\\\\example.com/",
        "http://example.com:0/",
        "http://example.com:65536/",
        "http://example.com:080/",
        "http://example.com:80:90/",
        "http://example.com:٨٠/",
        "http://example.com:/",
        "http://example.com:+80/",
        "http://example.com:8 0/",
        "http://exam ple.com/",
        "http://example.com/a b",
        " http://example.com/",
        "http://example.com/\n",
        "http://example.com/\r\nX: y",
        "http://example.com/\t",
        "http://example.com/\x00",
        "http://example.com/\x7f",
        "http://example.com/\x85",
        "http://example.com/\ud800",
        "http://\ud800.com/",
        "http://example.com/%0d%0aX:y",
        "http://example.com/?a=%0A",
        "http://example.com/%00",
        "http://example.com%00.evil.com/",
        "http://ex%61mple.com/",
        f"http://{'a' * 64}.com/",
        f"http://{'.'.join(['a' * 50] * 5)}/",
        "http://a..com/",
        "http://.com/",
        "http://-a.com/",
        "http://a-.com/",
        "http://a!b.com/",
        "http://xn--a/",
        "http://xn--zzzzzzzzz99999.com/",
        "http://i❤.ws/",
        "http://a\u200db.com/",
        "http://good.com\uff0fevil/",
        "example.com",
        "//example.com/",
        "/path",
        "",
        "http",
        "://example.com",
    ],
)
def test_an_ambiguous_url_is_malformed(text: str) -> None:
    refusal = parse_url(text)

    assert isinstance(refusal, BadUrl)
    assert refusal.reason is UrlReason.MALFORMED_URL


@pytest.mark.parametrize(
    "text",
    [
        "file:///etc/passwd",
        "gopher://example.com/",
        "ftp://example.com/",
        "dict://example.com/",
        "data:text/html,x",
        "javascript:alert(1)",
        "jar:http://example.com!/",
        "unix:/run/docker.sock",
        "http+unix://x/",
        "ws://example.com/",
        "example.com:80/",
    ],
)
def test_other_schemes_are_not_supported(text: str) -> None:
    refusal = parse_url(text)

    assert isinstance(refusal, BadUrl)
    assert refusal.reason is UrlReason.UNSUPPORTED_SCHEME


@pytest.mark.parametrize(
    "text",
    [
        "http://",
        "http:///path",
        "http:/example.com",
        "http:example.com",
        "http://:80/",
        "http://?q",
        "http://#",
    ],
)
def test_a_url_without_a_host_is_refused_with_that_reason(text: str) -> None:
    refusal = parse_url(text)

    assert isinstance(refusal, BadUrl)
    assert refusal.reason is UrlReason.MISSING_HOST


def test_a_url_may_have_at_most_2048_characters() -> None:
    base = "http://example.com/"
    longest = base + "a" * (2048 - len(base))

    assert isinstance(parse_url(longest), Target)
    refusal = parse_url(longest + "a")
    assert isinstance(refusal, BadUrl)
    assert refusal.reason is UrlReason.URL_TOO_LONG


def test_a_refusal_never_quotes_the_url() -> None:
    refusal = parse_url("http://user:CANARY@example.com/?token=CANARY")

    assert isinstance(refusal, BadUrl)
    assert "CANARY" not in refusal.detail


_WORDS = "http https :// : / ? # @ [ ] % %0 \\ . .. - _ example.com xn-- 127.0.0.1 0x7f 1 ::1"
_PIECES = st.sampled_from([*_WORDS.split(), "\u0668", "é", "。", "\u0130", "\u212a", " "])
_URLS = (
    st.text(max_size=40)
    | st.lists(_PIECES | st.characters(), max_size=12).map("".join)
    | st.lists(_PIECES | st.characters(), max_size=12).map(lambda parts: "http://" + "".join(parts))
)


@pytest.mark.slow
@given(_URLS)
@settings(max_examples=500, deadline=None)
def test_no_text_crashes_the_parser_and_its_normal_form_is_stable(text: str) -> None:
    target = parse_url(text)

    if isinstance(target, Target):
        assert target.url.isascii()
        assert not set(target.url) & set(" \t\r\n\\\x00")
        assert parse_url(target.url) == target


_HOSTS = st.from_regex(r"([a-z0-9_-]{1,4}\.){0,3}[a-z0-9-]{1,4}", fullmatch=True) | st.from_regex(
    r"([0-9]{1,3}\.){3}[0-9]{1,3}", fullmatch=True
)
_TAILS = st.from_regex(r"(:[0-9]{1,6})?(/[a-z%0-9.]{0,6})?(\?[a-z%0-9=]{0,6})?", fullmatch=True)


@pytest.mark.slow
@given(st.sampled_from(["http", "https"]), _HOSTS, _TAILS)
@settings(max_examples=500, deadline=None)
def test_the_fast_parser_and_the_careful_parser_agree(scheme: str, host: str, tail: str) -> None:
    text = f"{scheme}://{host}{tail}"

    assert parse_url(text) == _parse_carefully(text)


@pytest.mark.parametrize(
    ("location", "url"),
    [
        ("http://other.com/x", "http://other.com/x"),
        ("//other.com/x", "https://other.com/x"),
        ("//127.0.0.1", "https://127.0.0.1/"),
        ("/x?y#z", "https://site.com:8443/x?y"),
        ("x", "https://site.com:8443/a/x"),
        ("./x", "https://site.com:8443/a/x"),
        ("../x", "https://site.com:8443/x"),
        ("../../../x/", "https://site.com:8443/x/"),
        ("..", "https://site.com:8443/"),
        ("?p=2", "https://site.com:8443/a/b?p=2"),
        ("#top", "https://site.com:8443/a/b?c=d"),
        ("", "https://site.com:8443/a/b?c=d"),
        (" /with space ", "https://site.com:8443/with%20space"),
        ("/é", "https://site.com:8443/%C3%A9"),
        ("/a?u=../..", "https://site.com:8443/a?u=../.."),
    ],
)
def test_a_redirect_location_is_resolved_as_rfc_3986_says(location: str, url: str) -> None:
    base = parse_url("https://site.com:8443/a/b?c=d")
    assert isinstance(base, Target)

    target = join(base, location)

    assert isinstance(target, Target)
    assert target.url == url


@pytest.mark.parametrize(
    "location",
    [
        "file:///etc/passwd",
        "//",
        "/\\evil.com",
        "http:\\\\evil.com",
        "//a@b/",
        "/\r\nX: y",
        "http://0x7f.1/",
    ],
)
def test_a_redirect_to_an_ambiguous_url_is_refused(location: str) -> None:
    base = parse_url("https://site.com/")
    assert isinstance(base, Target)

    assert isinstance(join(base, location), BadUrl)
