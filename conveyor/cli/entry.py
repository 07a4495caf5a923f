"""The entry of the program: handles signals before anything else is loaded
(docs/operations.md, Starting and stopping)."""

from __future__ import annotations

from conveyor.cli.exits import install_handlers


def main() -> None:
    install_handlers()
    # Here, because loading the rest takes a good part of a second in which a signal may come.
    from conveyor.cli.main import main as run

    run()
