"""Records which functions of the program are called, in order, and for which step of a task.

A profile function sees every call in every thread. A call belongs to the step of the innermost
function on its stack that starts one. Where none does, it belongs to the step that started this
Trio task, thread or callback: a context variable carries it there. Work for several tasks together,
such as a group commit, belongs to the step of the first of them.
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

# Steps of functions that start none of their own: work that is not recorded, and work for whatever
# request the client is waiting for.
IGNORED = "ignored"
BY_REQUEST = "by request"

# Comprehensions, lambdas and inner functions count as the function that contains them.
_INNER = re.compile(r"\.<locals>.*|\.?<\w+>$")

# Supervisors start no step, and are called for every one: then the client knows best.
_inherited: ContextVar[str] = ContextVar("step", default=BY_REQUEST)


@dataclass(frozen=True, slots=True)
class Passed:
    """A function of the product, called at least once in a step."""

    file: str
    function: str


@dataclass(slots=True)
class CallTrace:
    """`steps` maps the code of a function to the step that it starts; `request_step` is the step of
    the request that the client waits for."""

    steps: Mapping[CodeType, str]
    request_step: str = ""
    is_recording: bool = False
    passed: dict[tuple[str, Passed], None] = field(default_factory=dict)
    _functions: dict[CodeType, Passed | None] = field(default_factory=dict)

    @contextmanager
    def installing(self) -> Iterator[None]:
        """Watches this thread and those that are started in the block. Steps are followed all the
        time, so that an actor that waits when recording begins is known; calls are not."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        try:
            with _contexts_kept():
                yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def begin(self, request_step: str) -> None:
        """The client starts this step; from the first one on, calls are recorded."""
        self.request_step = request_step
        self.is_recording = True

    def end(self) -> None:
        self.is_recording = False

    def lines(self, step: str) -> Iterator[tuple[str, list[str]]]:
        """The functions passed in a step by first call, neighbours of one file together."""
        calls = [call for at, call in self.passed if at == step]
        for file, group in groupby(calls, key=lambda call: call.file):
            yield file, [call.function for call in group]

    @property
    def files(self) -> Sequence[str]:
        return sorted({call.file for _, call in self.passed})

    @property
    def functions(self) -> Sequence[Passed]:
        return list(dict.fromkeys(call for _, call in self.passed))

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        # A coroutine that goes on is a call too: an actor that waited has then been passed.
        if event != "call" or (call := self._function_of(frame.f_code)) is None:
            return
        step = self._find_step(frame)
        if step != IGNORED and self.is_recording:
            self.passed.setdefault((step, call))

    def _find_step(self, frame: FrameType) -> str:
        caller: FrameType | None = frame
        while caller is not None and caller.f_code not in self.steps:
            caller = caller.f_back
        if caller is not None:
            _inherited.set(self.steps[caller.f_code])
        step = _inherited.get()
        return self.request_step if step == BY_REQUEST else step

    def _function_of(self, code: CodeType) -> Passed | None:
        if code not in self._functions:
            self._functions[code] = _product_function(code)
        return self._functions[code]


@contextmanager
def _contexts_kept() -> Iterator[None]:
    """Trio runs threads and callbacks of its low level without the context of their caller."""
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


def _product_function(code: CodeType) -> Passed | None:
    path = Path(code.co_filename)
    # Bodies of modules and classes are no functions: they run when something is imported.
    if not code.co_flags & inspect.CO_OPTIMIZED or not path.is_relative_to(ROOT):
        return None
    file = path.relative_to(ROOT).as_posix()
    if not file.startswith(PRODUCT) or file.startswith(NOT_PRODUCT):
        return None
    return Passed(file, _INNER.sub("", code.co_qualname) or code.co_name)
