"""The actions of `js_instructions`: reads them, and performs them on a page
(docs/gateway.md, Instructions).

Every instruction is checked before the page is loaded, so that a mistake in the last one does not
cost a page. An instruction that fails does not end the others; the report states which failed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec
import trio

from conveyor.gateway.errors import CallFailed, CallRefused, Fault

INSTRUCTIONS_MAX = 100
# One instruction waits at most this long, as the fetch API documents it.
WAIT_MS_MAX = 30_000
# All of them together, so that the page has time left within its call.
WAIT_ALL_MS_MAX = 120_000
# How long an instruction waits for an element that it acts on.
ELEMENT_S = 5.0
WAIT_FOR_S = 30.0
EVENTS = ("domcontentloaded", "load", "networkalmostidle", "networkidle")


class Instruction(msgspec.Struct, frozen=True):
    """`arguments` are the selector and the values, in the order of the API; `value` is what the
    caller wrote."""

    name: str
    arguments: tuple[str | int, ...]
    value: object


class InstructionFailed(Exception):
    """An instruction could not be performed. The message is for the report."""


class InstructedPage(Protocol):
    """What the instructions need of a page. `frame` is the selector of an iframe."""

    async def evaluate(
        self, function: str, *arguments: object, frame: str | None = None, wait_s: float = 0.0
    ) -> Any:
        """Calls a function in a world that the page cannot change, and returns its value. `wait_s`
        is how long the function itself waits."""

    async def run_script(self, script: str, *, frame: str | None = None) -> None:
        """Runs a script in the world of the page."""

    async def wait_for_event(self, name: str) -> None: ...


# What an action does with its element. A framework sees a changed value only if the setter of the
# prototype was called and both events were fired.
_ACTIONS = {
    "click": "element => { element.scrollIntoView({block: 'center'}); element.click(); }",
    "check": "element => { if (!element.checked) element.click(); }",
    "uncheck": "element => { if (element.checked) element.click(); }",
    "fill": """(element, value) => {
        const kind = element instanceof HTMLTextAreaElement
            ? HTMLTextAreaElement : HTMLInputElement;
        const setter = Object.getOwnPropertyDescriptor(kind.prototype, 'value').set;
        element.focus();
        setter.call(element, value);
        element.dispatchEvent(new Event('input', {bubbles: true}));
        element.dispatchEvent(new Event('change', {bubbles: true}));
    }""",
    "select_option": """(element, value) => {
        element.value = value;
        element.dispatchEvent(new Event('input', {bubbles: true}));
        element.dispatchEvent(new Event('change', {bubbles: true}));
    }""",
}
_ACTIONS_OF_FRAMES = {"frame_click": "click", "frame_check": "check", "frame_fill": "fill"}
_SCROLLS = {
    "scroll_x": "distance => window.scrollBy(distance, 0)",
    "scroll_y": "distance => window.scrollBy(0, distance)",
}
_SCROLL_TO = """place => window.scrollTo(
    0, place === 'top' ? 0 : Math.max(document.body?.scrollHeight ?? 0,
                                      document.documentElement.scrollHeight))"""
# Resolves to null when the element exists, and to a message if the selector is invalid.
WAIT_FOR_ELEMENT = """(selector, ms) => new Promise(resolve => {
    const find = () => document.querySelector(selector) !== null;
    try { if (find()) return resolve(null); }
    catch { return resolve('the selector is invalid'); }
    const end = result => { observer.disconnect(); clearTimeout(timer); resolve(result); };
    const observer = new MutationObserver(() => { if (find()) end(null); });
    const timer = setTimeout(() => end('no element matches the selector'), ms);
    observer.observe(document, {subtree: true, childList: true, attributes: true});
})"""

_TEXT, _PAIR, _TRIPLE, _COUNT = "text", "pair of texts", "three texts", "whole number"
# Each instruction with the form of its argument.
_FORMS = {
    "check": _TEXT,
    "click": _TEXT,
    "evaluate": _TEXT,
    "fill": _PAIR,
    "frame_check": _PAIR,
    "frame_click": _PAIR,
    "frame_evaluate": _PAIR,
    "frame_fill": _TRIPLE,
    "frame_wait_for": _PAIR,
    "scroll_to": _TEXT,
    "scroll_x": _COUNT,
    "scroll_y": _COUNT,
    "select_option": _PAIR,
    "uncheck": _TEXT,
    "wait": _COUNT,
    "wait_event": _TEXT,
    "wait_for": _TEXT,
}
_LENGTHS = {_TEXT: 1, _PAIR: 2, _TRIPLE: 3}


def parse_instructions(text: str) -> tuple[Instruction, ...]:
    """Reads the JSON of the parameter. Raises CallFailed for the first mistake."""
    try:
        steps = msgspec.json.decode(text, type=list[dict[str, Any]])
    except msgspec.DecodeError:
        raise _bad("must be a JSON list of objects") from None
    if len(steps) > INSTRUCTIONS_MAX:
        raise _bad(f"may have at most {INSTRUCTIONS_MAX} instructions")
    instructions = tuple(_parse_step(name, value) for step in steps for name, value in step.items())
    waits_ms = sum(int(step.arguments[0]) for step in instructions if step.name == "wait")
    if waits_ms > WAIT_ALL_MS_MAX:
        raise _bad(f"may wait at most {WAIT_ALL_MS_MAX} ms in all")
    return instructions


def _parse_step(name: str, value: object) -> Instruction:
    form = _FORMS.get(name)
    if form is None:
        known = ", ".join(sorted(_FORMS))
        raise _bad(f"has the unknown instruction {name[:40]!r}; there are {known}")
    if form == _COUNT:
        if not isinstance(value, int) or isinstance(value, bool) or abs(value) > 1_000_000:
            raise _bad(f"needs a {_COUNT} for {name}")
        if name == "wait" and not 0 <= value <= WAIT_MS_MAX:
            raise _bad(f"may wait at most {WAIT_MS_MAX} ms in one instruction")
        return Instruction(name, (value,), value)
    items = value if isinstance(value, list) else [value]
    texts = tuple(item for item in items if isinstance(item, str))
    if len(texts) != len(items) or len(texts) != _LENGTHS[form]:
        raise _bad(f"needs a {form} for {name}")
    if name == "wait_event" and value not in EVENTS:
        raise _bad(f"needs one of {', '.join(EVENTS)} for {name}")
    if name == "scroll_to" and value not in {"top", "bottom"}:
        raise _bad(f"needs top or bottom for {name}")
    return Instruction(name, texts, value)


def _bad(rule: str) -> CallFailed:
    return CallFailed(Fault.BAD_PARAMETER, f"js_instructions {rule}.")


async def perform(page: InstructedPage, instructions: Sequence[Instruction]) -> dict[str, Any]:
    """Performs the instructions in order. Returns the report of the fetch API."""
    began_at = trio.current_time()
    lines = [await _perform_one(page, instruction) for instruction in instructions]
    failed_count = sum(not line["success"] for line in lines)
    return {
        "instructions_duration": _ms_since(began_at),
        "instructions_executed": len(lines),
        "instructions_succeeded": len(lines) - failed_count,
        "instructions_failed": failed_count,
        "instructions": lines,
    }


async def _perform_one(page: InstructedPage, instruction: Instruction) -> dict[str, Any]:
    began_at = trio.current_time()
    line: dict[str, Any] = {
        "instruction": instruction.name,
        "params": {instruction.name: instruction.value},
        "success": True,
    }
    try:
        await _performer(instruction)(page)
    except (InstructionFailed, CallRefused) as error:
        line |= {"success": False, "error": str(error)[:200]}
    line["duration"] = _ms_since(began_at)
    return line


def _performer(instruction: Instruction) -> Callable[[InstructedPage], Awaitable[object]]:
    name, arguments = instruction.name, instruction.arguments
    first, last = arguments[0], arguments[-1]
    if name == "wait":
        assert isinstance(first, int)
        wait_s = first / 1000
        return lambda _: _sleep(wait_s)
    if name in _SCROLLS:
        return lambda page: page.evaluate(_SCROLLS[name], first)
    if name == "scroll_to":
        return lambda page: page.evaluate(_SCROLL_TO, first)
    if name == "wait_event":
        return lambda page: _wait_for_event(page, str(first))
    if name == "evaluate":
        return lambda page: page.run_script(str(first))
    if name == "frame_evaluate":
        return lambda page: page.run_script(str(last), frame=str(first))
    if name == "wait_for":
        return lambda page: _find(page, str(first), WAIT_FOR_S)
    if name == "frame_wait_for":
        return lambda page: _find(page, str(last), WAIT_FOR_S, frame=str(first))
    if name in _ACTIONS_OF_FRAMES:
        action = _ACTIONS[_ACTIONS_OF_FRAMES[name]]
        return lambda page: _act(page, action, arguments[1:], frame=str(first))
    return lambda page: _act(page, _ACTIONS[name], arguments)


async def _sleep(seconds: float) -> None:
    await trio.sleep(seconds)


async def _act(
    page: InstructedPage, action: str, arguments: Sequence[str | int], frame: str | None = None
) -> None:
    selector, *values = arguments
    await _find(page, str(selector), ELEMENT_S, frame=frame)
    function = f"(selector, ...values) => ({action})(document.querySelector(selector), ...values)"
    await page.evaluate(function, selector, *values, frame=frame)


async def _find(
    page: InstructedPage, selector: str, wait_s: float, frame: str | None = None
) -> None:
    wait_ms = int(wait_s * 1000)
    failure = await page.evaluate(WAIT_FOR_ELEMENT, selector, wait_ms, frame=frame, wait_s=wait_s)
    if failure is not None:
        raise InstructionFailed(failure)


async def _wait_for_event(page: InstructedPage, name: str) -> None:
    with trio.move_on_after(WAIT_FOR_S) as scope:
        await page.wait_for_event(name)
    if scope.cancelled_caught:
        raise InstructionFailed("the event did not occur")


def _ms_since(began_at: float) -> int:
    return round((trio.current_time() - began_at) * 1000)
