"""The normal form of a URL."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.domain.submit.url_normalization import normalize_url


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("HTTP://Example.COM/", "http://example.com/"),
        ("http://example.com", "http://example.com/"),
        ("http://example.com.", "http://example.com/"),
        ("http://example.com?a=1", "http://example.com/?a=1"),
        ("http://example.com:80/a", "http://example.com/a"),
        ("https://example.com:443/a", "https://example.com/a"),
        ("http://example.com:443/a", "http://example.com:443/a"),
        ("http://example.com/a#part", "http://example.com/a"),
        ("http://example.com/a/./b/../c", "http://example.com/a/c"),
        ("http://example.com/..", "http://example.com/"),
        ("http://example.com/../../a", "http://example.com/a"),
        ("http://example.com/a/%2e%2E/b", "http://example.com/b"),
        ("http://example.com/%7Euser/%c3%a9", "http://example.com/~user/%C3%A9"),
        ("http://example.com/é", "http://example.com/%C3%A9"),
        ("http://bücher.example/", "http://xn--bcher-kva.example/"),
        ("http://example.com/a%2fb", "http://example.com/a%2Fb"),
        ("http://example.com/100%", "http://example.com/100%"),
        ("http://example.com/%%341", "http://example.com/%%341"),
        ("http://example.com/?q=%41&b=%2f..", "http://example.com/?q=A&b=%2F.."),
        ("http://[2001:DB8::1]:80/", "http://[2001:db8::1]/"),
    ],
)
def test_a_url_has_one_normal_form(url: str, normal: str) -> None:
    assert normalize_url(url) == normal
    assert normalize_url(normal) == normal


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://example.com/?a=1&b=2", "http://example.com/?b=2&a=1"),
        ("http://example.com/a", "http://example.com/a/"),
        ("http://example.com/a", "http://example.com/A"),
        ("http://example.com/a", "https://example.com/a"),
        ("http://example.com/a", "http://example.com/a?"),
        ("http://example.com/a", "http://www.example.com/a"),
        ("http://example.com/a%2Fb", "http://example.com/a/b"),
        ("http://example.com/a//b", "http://example.com/a/b"),
    ],
)
def test_urls_that_a_site_can_tell_apart_have_different_normal_forms(one: str, other: str) -> None:
    assert normalize_url(one) != normalize_url(other)


def test_a_text_that_is_no_url_has_no_normal_form() -> None:
    assert normalize_url("not a url") is None


@given(st.text(alphabet="aB/.%123456eEfF?&=~-_#", max_size=40))
def test_normalising_twice_gives_the_same_url(tail: str) -> None:
    normal = normalize_url(f"http://example.com/{tail}")
    assert normal is None or normalize_url(normal) == normal
