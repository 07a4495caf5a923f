"""The file extension of a stored body."""

from __future__ import annotations

import pytest

from conveyor.domain.submit.scraper_params import extension_for


@pytest.mark.parametrize(
    ("content_type", "extension"),
    [
        ("text/html", "html"),
        ("Text/HTML ; charset=utf-8", "html"),
        ("application/xhtml+xml", "html"),
        ("application/xml", "xml"),
        ("text/plain", "txt"),
        ("image/jpeg", "jpg"),
        ("application/octet-stream", "bin"),
        ("", "bin"),
        ("../etc/passwd", "bin"),
    ],
)
def test_the_extension_of_a_file_follows_from_its_content_type(
    content_type: str, extension: str
) -> None:
    assert extension_for(content_type) == extension
