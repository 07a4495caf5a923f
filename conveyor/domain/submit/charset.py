"""Charsets: reads the text of a page (docs/content.md), and tells HTML that has no type.

A page may name any codec of Python as its charset. Some of them are no charsets: base64 and zlib
expand what they decode, and idna, punycode and undefined raise instead of replacing what they
cannot read. A page that names one of them is read as UTF-8.
"""

from __future__ import annotations

import codecs
import re

_CHARSET = re.compile(r"charset\s*=\s*[\"']?\s*([A-Za-z0-9._:-]{1,40})", re.IGNORECASE)
# A page states its charset in its first 1,024 bytes, by the rules of HTML.
_DECLARATION_BYTES = 1024
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_NO_CHARSETS = frozenset({"idna", "punycode", "unicode_escape", "raw_unicode_escape", "undefined"})
# The start of a page after a byte order mark, an XML declaration and comments. The groups never go
# back, so a hostile start takes time in proportion to its length.
_HTML_START = re.compile(
    rb"(?>\xef\xbb\xbf)?(?>(?:\s+|<!--(?>.*?-->)|<\?xml(?>[^>]*>))*)<(?:!doctype\s+html|html|head)\b",
    re.IGNORECASE | re.DOTALL,
)
_START_BYTES = 2048


def looks_like_html(body: bytes) -> bool:
    """Whether an answer without a type is a page, as it is for a browser."""
    return _HTML_START.match(body, 0, _START_BYTES) is not None


def decode_page(body: bytes, content_type: str) -> str:
    """Returns the text of a page in the charset of its byte order mark, its content type or its
    declaration; UTF-8 if it names none, or one that does not exist."""
    for mark, name in _MARKS:
        if body.startswith(mark):
            return body[len(mark) :].decode(name, errors="replace")
    return body.decode(find_charset(body, content_type) or "utf-8", errors="replace")


def find_charset(body: bytes, content_type: str) -> str | None:
    """Returns the codec of the charset that the content type or the page names; None if there is
    no such charset."""
    named = _find_name(content_type) or _find_name(body[:_DECLARATION_BYTES].decode("latin-1"))
    return None if named is None else _codec_of(named)


def _find_name(text: str) -> str | None:
    # The pattern takes three microseconds to find nothing in the declaration of a page.
    match = _CHARSET.search(text) if "charset" in text.lower() else None
    return None if match is None else match[1].lower()


def _codec_of(name: str) -> str | None:
    # Browsers read these as the Windows charset, which has more characters.
    name = "cp1252" if name in {"iso-8859-1", "latin1", "latin-1", "us-ascii", "ascii"} else name
    try:
        codec = codecs.lookup(name)
    except (LookupError, ValueError):
        return None
    is_charset = getattr(codec, "_is_text_encoding", False) and codec.name not in _NO_CHARSETS
    return codec.name if is_charset else None
