"""Prints what the image installs: build backend, dependencies, extras of the shared engines."""

import sys
import tomllib
from pathlib import Path

EXTRAS = ("aws", "postgres")


def main() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    names = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for extra in EXTRAS:
        names += project["project"]["optional-dependencies"][extra]
    sys.stdout.write("\n".join(names) + "\n")


if __name__ == "__main__":
    main()
