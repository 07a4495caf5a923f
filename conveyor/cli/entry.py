"""The entry of the program: handles signals before anything else is loaded
(docs/operations.md, Starting and stopping)."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
from types import FrameType


def main() -> None:
    install_handlers()
    # Here, because loading the rest takes a good part of a second in which a signal may come.
    from conveyor.cli.main import main as run

    run()


# Exits: the process ends by a deadline, whatever hangs in it
# (docs/operations.md, Starting and stopping).
#
# Everything that Conveyor promises holds on `kill -9` as well, so a process that cannot end in
# order ends without it. The signal handlers here also work in process 1 of a container, which
# ignores every signal that it has no handler for; and a SIGTERM that comes while the program is
# still loading ends it at once. This module imports next to nothing, so that it can come before
# everything else.


# sysexits.h calls it EX_SOFTWARE: we ended because something of ours hung.
STUCK_STATUS = 70
# A worker tree that failed has nothing left to hand over in order; what is stuck in it stays stuck.
FAILED_STOP_S = 10
# After its last step the interpreter only joins threads and closes files.
LAST_STEPS_S = 10
# The handler needs the interpreter; this many seconds later a thread that does not need it ends the
# process, with the stack of every thread in the log.
_WITHOUT_INTERPRETER_S = 5
# Enough for the connections of a busy process; some systems allow a million, and every one that is
# left open by mistake would be found that much later.
_DESCRIPTORS = 65_536


def install_handlers() -> None:
    """SIGTERM ends the process at once until a command says otherwise; an alarm always does."""
    signal.signal(signal.SIGTERM, _exit_terminated)
    signal.signal(signal.SIGALRM, _exit_stuck)


def set_deadline(seconds: int) -> None:
    """The process ends within so many seconds from now; a shorter time that was set holds."""
    left = signal.alarm(seconds)
    if 0 < left < seconds:
        signal.alarm(left)
        return
    try:
        faulthandler.dump_traceback_later(seconds + _WITHOUT_INTERPRETER_S, exit=True)
    except (RuntimeError, ValueError, OSError, MemoryError):
        # No thread can be started, or stderr is no file: the alarm has to do.
        return


def raise_descriptor_limit() -> None:
    """Lets the process open as many files as the system allows it to ask for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _exit_terminated(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)


def _exit_stuck(_: int, __: FrameType | None) -> None:
    os.write(2, b"Conveyor did not end in time, and ends now; nothing is lost by that.\n")
    os._exit(STUCK_STATUS)
