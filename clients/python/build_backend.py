"""The build backend of conveyor-client: setuptools, after the package was collected.

A source distribution contains the collected package, so it builds without the repository.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from collect import collect
from setuptools import build_meta

P = ParamSpec("P")
T = TypeVar("T")

HERE = Path(__file__).resolve().parent
GENERATED = HERE / "generated"
REPOSITORY = HERE.parent.parent


def _collect_first(hook: Callable[P, T]) -> Callable[P, T]:
    @wraps(hook)
    def collect_and_run(*args: P.args, **kwargs: P.kwargs) -> T:
        if (REPOSITORY / "conveyor/sdk").is_dir():
            shutil.rmtree(GENERATED, ignore_errors=True)
            collect(REPOSITORY, GENERATED)
        return hook(*args, **kwargs)

    return collect_and_run


get_requires_for_build_wheel = _collect_first(build_meta.get_requires_for_build_wheel)
prepare_metadata_for_build_wheel = _collect_first(build_meta.prepare_metadata_for_build_wheel)
build_wheel = _collect_first(build_meta.build_wheel)
get_requires_for_build_sdist = _collect_first(build_meta.get_requires_for_build_sdist)
build_sdist = _collect_first(build_meta.build_sdist)
get_requires_for_build_editable = _collect_first(build_meta.get_requires_for_build_editable)
prepare_metadata_for_build_editable = _collect_first(build_meta.prepare_metadata_for_build_editable)
build_editable = _collect_first(build_meta.build_editable)
