"""Prints what the image installs: build backend, dependencies, and the extras that are named.

python image_requirements.py aws postgres
"""

import sys
import tomllib
from pathlib import Path


def main(extras: list[str]) -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    names = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for extra in extras:
        names += project["project"]["optional-dependencies"][extra]
    sys.stdout.write("\n".join(names) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
