"""`python -m tests [PART] [pytest options]`: runs one part of the tests, or all of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent
IN_PARALLEL = ("-n", "auto", "--dist", "loadscope")


def parts() -> list[str]:
    """Returns the names of all folders that contain tests."""
    return sorted({path.relative_to(HERE).parts[0] for path in HERE.glob("*/**/test_*.py")})


def main(arguments: Sequence[str]) -> int:
    part, rest = (arguments[0], arguments[1:]) if arguments else ("", ())
    if part.startswith("-") or not part:
        return pytest.main([str(HERE), *IN_PARALLEL, *arguments])
    if part not in parts():
        sys.stderr.write(f"There is no part {part!r}. There are: {', '.join(parts())}.\n")
        return 2
    return pytest.main([str(HERE / part), *rest])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
