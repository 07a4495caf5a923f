"""For notebooks and terminals: a progress bar of a run, and its results as a pandas DataFrame.

Neither IPython nor pandas is a requirement of the SDK.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING, Any

import msgspec

from conveyor.schemas.responses import RunResponse, TaskResult

if TYPE_CHECKING:
    from pandas import DataFrame

_CELLS = 30


class ProgressBar:
    """Shows the progress of a run: `client.wait(job_id, ProgressBar())`.

    In a notebook it is one line of output that changes. In a terminal it is a line on stderr.
    Elsewhere it shows nothing.
    """

    def __init__(self, file: IO[str] | None = None) -> None:
        self._file = file or sys.stderr
        self._run: RunResponse | None = None
        self._display: Any = None

    def __call__(self, run: RunResponse) -> None:
        is_first, self._run = self._run is None, run
        if is_first:
            self._display = _display(self)
        elif self._display is not None:
            self._display.update(self)
        if self._display is None and self._file.isatty():
            self._file.write(f"\r\x1b[2K{self}" + ("\n" if run.terminal else ""))
            self._file.flush()

    def __str__(self) -> str:
        if self._run is None:
            return "not started"
        stats = self._run.stats
        filled = _CELLS * stats.completed // max(stats.total, 1)
        bar = "#" * filled + "." * (_CELLS - filled)
        return f"[{bar}] {self._words()}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The rendering that notebooks ask for."""
        stats = self._run.stats if self._run is not None else None
        value, total = (0, 1) if stats is None else (stats.completed, max(stats.total, 1))
        return f'<progress value="{value}" max="{total}"></progress> {html.escape(self._words())}'

    def _words(self) -> str:
        if self._run is None:
            return "not started"
        run, stats = self._run, self._run.stats
        words = f"{stats.completed:,} of {stats.total:,}"
        if stats.failed:
            words += f", {stats.failed:,} failed"
        if run.terminal:
            return f"{words}, {run.status}"
        if run.waiting_on is not None:
            words += f", waits: {run.waiting_on.detail}"
        elif run.eta_seconds is not None:
            words += f", {run.eta_seconds:,} s left"
        return words


def _display(bar: ProgressBar) -> Any:
    """Returns the handle of a new output of the notebook, or None outside of one."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display

    return display(bar, display_id=True)


def frame_of(results: Iterable[TaskResult]) -> DataFrame:
    """Returns a DataFrame with a row for each result, in list order. It needs pandas."""
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"frame() needs {error.name}: pip install pandas") from None

    rows = [
        {name: getattr(result, name) for name in result.__struct_fields__}
        | {
            "status": result.status.value,
            "error": None if result.error is None else result.error.detail,
            "credits": 0 if result.spend is None else result.spend.total.credits,
            "metadata": msgspec.to_builtins(result.metadata),
        }
        for result in sorted(results, key=lambda result: result.index)
    ]
    columns = [*(name for name in TaskResult.__struct_fields__ if name != "spend"), "credits"]
    frame = pd.DataFrame(rows, columns=columns).set_index("index")
    for name in ("created_at", "updated_at", "started_at"):
        frame[name] = pd.to_datetime(frame[name], utc=True)
    return frame
