"""Records which functions of the product are called, in order, and for which step of a task.

A profile function sees every call in every thread. A call belongs to the step of the innermost
function on its stack that starts a step. If the stack has none, the call belongs to the step that
started this Trio task, thread or callback: a context variable carries the step there. Work for
several tasks at once, such as a group commit, belongs to the step of the first of them.
"""

from __future__ import annotations

import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import trio

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("conveyor/", "actors/")
NOT_PRODUCT = "conveyor/simulation/"

# Markers in place of a step: calls that are not recorded, and calls for the step of the request
# that the client waits for.
IGNORED = "ignored"
BY_REQUEST = "by request"

# Comprehensions, lambdas and nested functions count as the function that contains them.
_INNER = re.compile(r"\.<locals>.*|\.?<\w+>$")

# A supervisor serves every step, so a call that has only a supervisor above it counts for the
# step that the client waits for.
_inherited: ContextVar[str] = ContextVar("step", default=BY_REQUEST)


@dataclass(frozen=True, slots=True)
class CalledFunction:
    """A function of the product that was called at least once in a step."""

    file: str
    function: str


@dataclass(slots=True)
class CallTrace:
    """`steps` maps the code of a function to the step that it starts; `request_step` is the step of
    the request that the client waits for."""

    steps: Mapping[CodeType, str]
    request_step: str = ""
    is_recording: bool = False
    called: dict[tuple[str, CalledFunction], None] = field(default_factory=dict)
    _functions: dict[CodeType, CalledFunction | None] = field(default_factory=dict)

    @contextmanager
    def installing(self) -> Iterator[None]:
        """Records the calls of this thread and of threads that start inside the block. The step of
        each task is tracked from here on, so that it is known for actors that already wait when
        recording begins; calls are recorded only from `begin` on."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        try:
            with _keeping_contexts():
                yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def begin(self, request_step: str) -> None:
        """Starts recording, or goes on to the next step. The client calls it before a request."""
        self.request_step = request_step
        self.is_recording = True

    def end(self) -> None:
        self.is_recording = False

    def lines(self, step: str) -> Iterator[tuple[str, list[str]]]:
        """Yields the files of a step with their functions, in the order of the first call."""
        calls = [call for at, call in self.called if at == step]
        for file, group in groupby(calls, key=lambda call: call.file):
            yield file, [call.function for call in group]

    @property
    def files(self) -> Sequence[str]:
        return sorted({call.file for _, call in self.called})

    @property
    def functions(self) -> Sequence[CalledFunction]:
        return list(dict.fromkeys(call for _, call in self.called))

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        # A coroutine that is resumed counts as a call, so an actor that waited is recorded too.
        if event != "call" or (call := self._function_of(frame.f_code)) is None:
            return
        step = self._find_step(frame)
        if step != IGNORED and self.is_recording:
            self.called.setdefault((step, call))

    def _find_step(self, frame: FrameType) -> str:
        caller: FrameType | None = frame
        while caller is not None and caller.f_code not in self.steps:
            caller = caller.f_back
        if caller is not None:
            _inherited.set(self.steps[caller.f_code])
        step = _inherited.get()
        return self.request_step if step == BY_REQUEST else step

    def _function_of(self, code: CodeType) -> CalledFunction | None:
        if code not in self._functions:
            self._functions[code] = _product_function(code)
        return self._functions[code]


@contextmanager
def _keeping_contexts() -> Iterator[None]:
    """Makes Trio run worker threads and `run_sync_soon` callbacks in the context of their caller.
    Trio itself runs them without it."""
    start_thread, run_soon = trio.lowlevel.start_thread_soon, trio.lowlevel.TrioToken.run_sync_soon

    def start_thread_soon(work: Callable[[], Any], deliver: Callable[[Any], object]) -> None:
        context = copy_context()
        start_thread(partial(context.run, work), deliver)

    def run_sync_soon(
        token: trio.lowlevel.TrioToken, work: Callable[..., object], *arguments: Any
    ) -> None:
        run_soon(token, copy_context().run, work, *arguments)

    trio.lowlevel.start_thread_soon = start_thread_soon  # type: ignore[assignment]
    trio.lowlevel.TrioToken.run_sync_soon = run_sync_soon  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        trio.lowlevel.start_thread_soon = start_thread
        trio.lowlevel.TrioToken.run_sync_soon = run_soon  # type: ignore[method-assign]


def code_of(function: Callable[..., object]) -> CodeType:
    code = inspect.unwrap(function).__code__
    assert isinstance(code, CodeType)
    return code


def _product_function(code: CodeType) -> CalledFunction | None:
    path = Path(code.co_filename)
    # Bodies of modules and classes run when something is imported; they do not count.
    if not code.co_flags & inspect.CO_OPTIMIZED or not path.is_relative_to(ROOT):
        return None
    file = path.relative_to(ROOT).as_posix()
    if not file.startswith(PRODUCT) or file.startswith(NOT_PRODUCT):
        return None
    return CalledFunction(file, _INNER.sub("", code.co_qualname) or code.co_name)
