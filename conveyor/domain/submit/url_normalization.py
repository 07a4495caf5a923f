"""The normal form of a URL: two URLs that a site cannot tell apart have the same one.

The rule is RFC 3986, 6.2.2 and 6.2.3, without anything that depends on a site:

- scheme and host in lower case, an international name as its A-label, no dot at the end;
- no default port, no fragment, and `/` for an empty path;
- percent-encodings of letters, digits, `-`, `.`, `_` and `~` decoded, all others in upper case;
- no dot segments in the path, also where the dots were percent-encoded.

The query keeps its parameters and their order, because some sites read them by position. A trailing
slash, `index.html`, the letter case of the path, `http` against `https` and `www.` are differences.
"""

from __future__ import annotations

import re

from conveyor.domain.submit.target import Target, parse_url, without_dot_segments

# Not after a stray percent sign, which would form a new encoding with what is decoded.
_PERCENT_ENCODED = re.compile(r"(?<!%)(?<!%[0-9A-Fa-f])%[0-9A-Fa-f]{2}")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


def normalize_url(url: str) -> str | None:
    """Returns the normal form of `url`, or None for a text that is not a URL."""
    target = parse_url(url)
    return normalize_target(target).url if isinstance(target, Target) else None


def normalize_target(target: Target) -> Target:
    """Returns the target whose URL is the normal form. `parse_url` has normalised the rest of it
    already: scheme, host, port, fragment and empty path."""
    tail = normalize_path(target.path_and_query)
    if tail == target.path_and_query:
        return target
    return Target(target.scheme, target.host, target.port, tail)


def normalize_path(path_and_query: str) -> str:
    return without_dot_segments(normalize_escapes(path_and_query))


def normalize_escapes(text: str) -> str:
    return _PERCENT_ENCODED.sub(_normal_octet, text) if "%" in text else text


def _normal_octet(match: re.Match[str]) -> str:
    character = chr(int(match[0][1:], 16))
    return character if character in _UNRESERVED else match[0].upper()
