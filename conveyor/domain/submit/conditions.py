"""The conditions that a caller sets for a page: `must_contain`, `must_match` and `min_bytes`
(docs/content.md, Conditions).

A page that does not meet them is no success, whatever its status is. They are checked when they are
submitted. Patterns are those of RE2, which does not backtrack: a match takes time in proportion to
the page and to the compiled pattern, and both are bounded. Measured, the worst pattern takes 1.3
nanoseconds for each instruction and character, so four seconds at both bounds; ordinary patterns
take 10 milliseconds. A long match therefore runs outside the event loop. RE2 refuses what needs
backtracking: look-around and backreferences.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from typing import Any

from conveyor.domain import limits

CONDITIONS = frozenset({"min_bytes", "must_contain", "must_match"})
# Bytes of the compiled pattern and of the states that a match may keep.
_MATCH_BYTES_MAX = 1024 * 1024
# Instructions of a compiled pattern. A class of Unicode such as `\\pL` has 1,200.
_INSTRUCTIONS_MAX = 3000
_CHARSET = re.compile(r"charset\s*=\s*[\"']?\s*([A-Za-z0-9._:-]{1,40})", re.IGNORECASE)
# A page states its charset in its first 1,024 bytes, by the rules of HTML.
_DECLARATION_BYTES = 1024
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_NO_CHARSETS = frozenset({"idna", "punycode", "unicode_escape", "raw_unicode_escape", "undefined"})


def find_invalid(params: Mapping[str, str]) -> tuple[str, str] | None:
    """Returns the first condition that no page can be checked against, and the rule that it
    breaks."""
    text = params.get("min_bytes", "")
    if text and not (text.isascii() and text.isdigit() and len(text) <= 12):
        return "min_bytes", "must be a whole number of bytes"
    if text and int(text) > limits.BODY_BYTES_MAX:
        return "min_bytes", f"may be at most {limits.BODY_BYTES_MAX}, the size of the largest body"
    return _find_invalid_pattern(params.get("must_match", ""))


def _find_invalid_pattern(pattern: str) -> tuple[str, str] | None:
    if not pattern:
        return None
    if len(pattern) > limits.MUST_MATCH_CHARS_MAX:
        return "must_match", f"may have at most {limits.MUST_MATCH_CHARS_MAX} characters"
    import re2

    try:
        compiled = _compile(pattern)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace")
        return "must_match", f"is no pattern of RE2 ({reason[:100]})"
    if compiled.programsize > _INSTRUCTIONS_MAX:
        return "must_match", "is too complex: use fewer or smaller repetitions"
    return None


def has_conditions(params: Mapping[str, str]) -> bool:
    return any(params.get(key) for key in CONDITIONS)


def find_unmet(params: Mapping[str, str], body: bytes, content_type: str) -> str | None:
    """Returns the first condition that this page does not meet."""
    if len(body) < int(params.get("min_bytes") or 0):
        return "min_bytes"
    text = params.get("must_contain", "")
    pattern = params.get("must_match", "")
    if not text and not pattern:
        return None
    page = decode_page(body, content_type)
    if text and text not in page:
        return "must_contain"
    if pattern and _compile(pattern).search(page[: limits.MATCHED_CHARS_MAX]) is None:
        return "must_match"
    return None


def decode_page(body: bytes, content_type: str) -> str:
    """Returns the text of a page in the charset of its byte order mark, its content type or its
    declaration; UTF-8 if it names none, or one that does not exist."""
    for mark, name in _MARKS:
        if body.startswith(mark):
            return body[len(mark) :].decode(name, errors="replace")
    declared = _find_charset(content_type) or _find_charset(
        body[:_DECLARATION_BYTES].decode("latin-1")
    )
    return body.decode(_known_charset(declared), errors="replace")


def _find_charset(text: str) -> re.Match[str] | None:
    # The pattern takes three microseconds to find nothing in the declaration of a page.
    return _CHARSET.search(text) if "charset" in text.lower() else None


def _known_charset(declared: re.Match[str] | None) -> str:
    if declared is None:
        return "utf-8"
    name = declared[1].lower()
    # Browsers read these as the Windows charset, which has more characters.
    name = "cp1252" if name in {"iso-8859-1", "latin1", "latin-1", "us-ascii", "ascii"} else name
    try:
        codec = codecs.lookup(name)
    except (LookupError, ValueError):
        return "utf-8"
    # Codecs such as base64 and zlib are no charsets, and some of them expand what they decode.
    is_charset = getattr(codec, "_is_text_encoding", False) and codec.name not in _NO_CHARSETS
    return codec.name if is_charset else "utf-8"


def _compile(pattern: str) -> Any:
    # Imported by the first pattern: few jobs have one, and every command would wait for it.
    import re2

    options = re2.Options()
    options.max_mem = _MATCH_BYTES_MAX
    options.log_errors = False
    return re2.compile(pattern, options)
