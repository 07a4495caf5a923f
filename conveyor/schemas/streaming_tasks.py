"""Parses the list of a long body while it arrives, with one piece in memory at a time
(docs/api.md, Submitting lists).

The parser yields each line of `tasks` when its last byte has arrived. It collects the rest of the
body, with an empty `tasks`, and the caller decodes that at the end like any other body. The parser
searches only for brackets and strings, to find the end of each line. msgspec decodes the lines and
reports every other error.

The expressions are possessive (`*+`) or atomic (`(?>...)`): none of them backtracks, so that each
match takes linear time, for hostile input too.
"""

from __future__ import annotations

import re

import msgspec

from conveyor.domain import limits
from conveyor.domain.errors import InvalidArgument
from conveyor.domain.submit.admission import TaskDraft
from conveyor.schemas.requests import TaskInput, decode_strictly, drafts_of, malformed

# Groups are repeated by `(?>(?:...)*)`, not by `(?:...)*+`, which Python 3.11.0 to 3.11.4 match
# wrongly (CPython issue 106052).
#
# string = '"' { any byte except '"' and '\' } { '\' any byte { any byte except '"' and '\' } } '"'
_STRING = rb'"[^"\\]*+(?>(?:\\.[^"\\]*+)*)"'
# blank = the four whitespace characters of JSON, any number of them
_BLANK = rb"[ \t\r\n]*+"
# A token is a complete string, a bracket, or a lone quote.
# A lone quote begins a string whose end has not arrived yet.
_TOKEN = re.compile(_STRING + rb'|["\[\]{}]', re.DOTALL)
# after a string = blank [ ':' blank ] [ any byte ]
# A colon shows that the string is a name. The last byte shows what kind of value begins. If that
# byte is absent, the parser needs more input to decide.
_BEHIND_STRING = re.compile(_BLANK + rb"(:" + _BLANK + rb")?(.?)", re.DOTALL)
# flat = { any bytes except '"' and brackets | string }, that is, everything up to the next bracket
# outside of strings. It also stops at an unclosed string.
_FLAT = rb'(?>(?:[^"\[\]{}]++|' + _STRING + rb")*)"
_TO_BRACKET = re.compile(_FLAT + rb"([\[\]{}])", re.DOTALL)
# flat lines = { { whitespace | ',' } '{' flat '}' }
# Most lines contain no inner bracket. One match skips any number of them, which is faster than a
# Python loop over their brackets. Wrong commas are left to the decoder.
_FLAT_LINES = re.compile(rb"(?>(?:[ \t\r\n,]*+\{" + _FLAT + rb"\})*)", re.DOTALL)
_COMMA = re.compile(_BLANK + rb",")
# msgspec reports byte positions within a piece. They would mislead the caller, so they are removed.
_POSITION = re.compile(r" \(byte [0-9]+\)")

_LINES = msgspec.json.Decoder(list[TaskInput])


class StreamingTaskParser:
    """Parses one body piece by piece and returns the lines of its list.

    The parser has two states: in the envelope, and in the list. `_rest` holds the bytes that are
    not consumed yet; the first `_at` bytes of it are already scanned and are not scanned again.
    `_depth` counts the open brackets: of the whole body in the envelope, of the current
    line in the list.
    """

    def __init__(self) -> None:
        self._envelope = b""
        self._rest = b""
        self._at = 0
        self._depth = 0
        self._is_in_list = False
        self._has_list = False
        self.count = 0

    def feed(self, piece: bytes) -> list[TaskDraft]:
        """Returns the lines that end in this piece. Raises InvalidArgument for a malformed body."""
        self._rest += piece
        drafts: list[TaskDraft] = []
        while True:
            was_in_list = self._is_in_list
            if was_in_list:
                drafts += self._take_lines()
            else:
                self._pass_envelope()
            if self._is_in_list is was_in_list:
                return drafts

    def end(self) -> bytes:
        """Returns the body without its lines."""
        if self._is_in_list:
            raise malformed("it ends too early")
        return self._envelope + self._rest

    def _pass_envelope(self) -> None:
        """Moves bytes to `_envelope`, up to the end of the input or the start of the list."""
        for token in _TOKEN.finditer(self._rest, self._at):
            mark = token.group()
            if mark in b"{[":
                self._depth += 1
            elif mark in b"}]":
                self._depth -= 1
            elif mark == b'"':
                # The string is incomplete. Keep it in `_rest` until its end arrives.
                break
            elif self._depth == 1:
                behind = _BEHIND_STRING.match(self._rest, token.end())
                assert behind is not None
                if not behind[2]:  # It may be a name. The next piece shows it.
                    break
                if behind[1] and behind[2] == b"[" and _is_tasks(mark):
                    self._open_list(behind.end())
                    return
            self._at = token.end()
        self._keep(self._at)
        if len(self._envelope) + len(self._rest) > limits.LONG_BODY_LINE_BYTES_MAX:
            raise _too_long("the part of the body outside of tasks", None)

    def _open_list(self, at: int) -> None:
        if self._has_list:
            raise malformed("it names tasks twice", pointer="/tasks")
        self._keep(at)
        self._has_list = self._is_in_list = True
        self._depth = 0

    def _keep(self, size_bytes: int) -> None:
        self._envelope += self._rest[:size_bytes]
        self._rest, self._at = self._rest[size_bytes:], 0

    def _take_lines(self) -> list[TaskDraft]:
        """Returns all complete lines. A closing bracket at depth 0 ends the list."""
        rest, at, depth, end = self._rest, self._at, self._depth, 0
        while True:
            if not depth:
                flat = _FLAT_LINES.match(rest, at)
                assert flat is not None
                at, end = flat.end(), max(end, flat.end())
            match = _TO_BRACKET.match(rest, at)
            if match is None:
                break
            bracket = match[1]
            if bracket in b"{[":
                depth += 1
            elif depth:
                depth -= 1
                end = end if depth else match.end()
            else:
                return self._close_list(match.start(1))
            at = match.end()
        self._rest, self._at, self._depth = rest[end:], at - end, depth
        if len(self._rest) > limits.LONG_BODY_LINE_BYTES_MAX:
            raise _too_long("a line of tasks", f"/tasks/{self.count}")
        return self._decode(rest[:end]) if end else []

    def _close_list(self, at: int) -> list[TaskDraft]:
        last, self._rest = self._rest[:at], self._rest[at:]
        # `_rest` begins with the bracket that closes the list, so the depth there is 2: the object
        # of the body, and the list.
        self._is_in_list, self._at, self._depth = False, 0, 2
        return self._decode(last) if not self.count or last.strip() else []

    def _decode(self, lines: bytes) -> list[TaskDraft]:
        # Every piece of lines but the first begins with the comma after the previous line.
        if self.count:
            comma = _COMMA.match(lines)
            if comma is None or not lines[comma.end() :].strip():
                raise malformed(
                    "a comma is missing, or there is one too many", pointer=f"/tasks/{self.count}"
                )
            lines = lines[comma.end() :]
        try:
            tasks = decode_strictly(_LINES, b"[" + lines + b"]")
        except InvalidArgument as error:
            raise self._with_position(error) from None
        start, self.count = self.count, self.count + len(tasks)
        if self.count > limits.TASKS_MAX:
            raise InvalidArgument(
                f"A list has at most {limits.TASKS_MAX:,} lines.", pointer="/tasks"
            )
        return drafts_of(tasks, start=start)

    def _with_position(self, error: InvalidArgument) -> InvalidArgument:
        """Converts the pointer of an error from the piece to the whole list."""
        number, _, field = (error.pointer or "").lstrip("/").partition("/")
        pointer = f"/tasks/{self.count + int(number)}" if number.isdigit() else "/tasks"
        pointer = f"{pointer}/{field}" if field else pointer
        return InvalidArgument(_POSITION.sub("", str(error)), pointer=pointer, code=error.code)


def _is_tasks(name: bytes) -> bool:
    # Decode the name: a caller may write it with escapes.
    try:
        return bool(msgspec.json.decode(name) == "tasks")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


def _too_long(what: str, pointer: str | None) -> InvalidArgument:
    why = f"{what} has more than {limits.LONG_BODY_LINE_BYTES_MAX} bytes"
    return malformed(why, pointer=pointer)
