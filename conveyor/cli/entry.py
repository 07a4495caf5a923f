"""The entry of the program: handles signals before anything else is loaded
(docs/operations.md, Starting and stopping)."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import resource
import signal
import sys
from types import FrameType


def main() -> None:
    open_streams()
    install_handlers()
    # Imports make many objects that stay and few cycles. With the default thresholds, collections
    # take 6 % of the CPU time of a short command.
    gc.set_threshold(50_000, 20, 10)
    # Import after the handlers are installed: the import takes a large part of a second, and a
    # signal may arrive during it.
    from conveyor.cli.main import main as run

    run()


# The process always ends by a deadline, even if a part of it hangs
# (docs/operations.md, Starting and stopping).
#
# All guarantees of Conveyor also hold after `kill -9`, so a process that cannot end in order exits
# without clean-up. The signal handlers are necessary in process 1 of a container, which ignores
# every signal without a handler. A SIGTERM during the import of the program ends it at once. This
# module imports very little, so that it can run before everything else.


# EX_SOFTWARE of sysexits.h: the process exited because a part of it hung.
STUCK_STATUS = 70
# The time for a failed tree of actors to stop. It has no work left to release in order, and a part
# that hangs will not recover, so a larger value only delays the restart.
FAILED_STOP_S = 10
# The time after the last step of the program, when the interpreter only joins threads and closes
# files.
LAST_STEPS_S = 10
# The signal handler needs the interpreter. This many seconds later, a thread that does not need it
# ends the process and writes the stack of every thread to the log.
_WITHOUT_INTERPRETER_S = 5
# Enough for the connections of a busy process. Some systems allow a million; with such a limit, a
# descriptor leak would be noticed much later.
_DESCRIPTORS = 65_536


def open_streams() -> None:
    """Opens the standard streams that are closed. Otherwise the next file would have the
    descriptor of one, and get what is written to it."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(descriptor, "r" if descriptor == 0 else "w"))


def install_handlers() -> None:
    """Installs the handlers. SIGTERM and SIGINT end the process at once, without a traceback,
    until a command replaces their handlers. SIGALRM always ends it.
    """
    signal.signal(signal.SIGTERM, _exit_terminated)
    # A program that ignores it was started in the background by a shell, and goes on to do so.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _exit_interrupted)
    signal.signal(signal.SIGALRM, _exit_stuck)
    atexit.register(_ignore_signals)


def set_deadline(seconds: int) -> None:
    """Ends the process within `seconds` from now. An earlier deadline stays in force."""
    left = signal.alarm(seconds)
    if 0 < left < seconds:
        signal.alarm(left)
        return
    try:
        faulthandler.dump_traceback_later(seconds + _WITHOUT_INTERPRETER_S, exit=True)
    except (RuntimeError, ValueError, OSError, MemoryError):
        # No thread can be started, or stderr is no file. Only the alarm remains.
        return


def raise_descriptor_limit() -> None:
    """Raises the soft limit of open files to the hard limit, but at most to _DESCRIPTORS."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _ignore_signals() -> None:
    """Called when all threads have ended and only memory is left to free.

    The interpreter then removes its handlers, so a signal would kill the process and hide an exit
    status that is decided.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _exit_terminated(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)


def _exit_interrupted(number: int, _: FrameType | None) -> None:
    os.write(2, b"Interrupted.\n")
    os._exit(128 + number)


def _exit_stuck(_: int, __: FrameType | None) -> None:
    os.write(2, b"Conveyor did not end in time, and ends now; nothing is lost by that.\n")
    os._exit(STUCK_STATUS)
