"""The pinned packages against the Pythons that Conveyor supports."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from packaging.specifiers import SpecifierSet

from tests.tidy.sources import ROOT

_PIN = re.compile(r"^([\w.-]+)==(\S+)$", re.MULTILINE)


# 3.11.2 is the Python of Debian 12. A package whose metadata refuses one of these versions fails
# every installation there, with a message about conflicting versions.
@pytest.mark.parametrize("python", ["3.11.2", "3.13.0", "3.14.0"])
def test_every_pinned_package_supports_the_pythons_that_conveyor_supports(python: str) -> None:
    pins = dict(_PIN.findall((ROOT / "constraints.txt").read_text(encoding="utf-8")))
    wanted = {name: _required_python(name) for name in pins}

    assert wanted
    assert {name for name, text in wanted.items() if python not in SpecifierSet(text)} == set()


def _required_python(name: str) -> str:
    """The Python versions that the metadata of an installed package requires. Packages of extras
    that the tests do not need are not installed."""
    try:
        return str(distribution(name).metadata["Requires-Python"] or "")
    except PackageNotFoundError:
        return ""
