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

from collections.abc import Mapping
from typing import Any

from conveyor.domain import limits
from conveyor.domain.submit.charset import decode_page

CONDITIONS = frozenset({"min_bytes", "must_contain", "must_match"})
# Bytes of the compiled pattern and of the states that a match may keep.
_MATCH_BYTES_MAX = 1024 * 1024
# Instructions of a compiled pattern. A class of Unicode such as `\\pL` has 1,200.
_INSTRUCTIONS_MAX = 3000


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


def _compile(pattern: str) -> Any:
    # Imported by the first pattern: few jobs have one, and every command would wait for it.
    import re2

    options = re2.Options()
    options.max_mem = _MATCH_BYTES_MAX
    options.log_errors = False
    return re2.compile(pattern, options)
