"""Where the ``dledger`` command begins: ``cluster.cli``, and before it what cannot wait until that is loaded."""

from __future__ import annotations

import errno
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Final

_SERVERS: Final = frozenset({"broker", "console", "serve"})
_OUTPUT_ERRORS: Final = frozenset({errno.ENOSPC, errno.EIO, errno.EBADF, errno.EFBIG, errno.EDQUOT})
"""Of a write to something that has no name here; a broken pipe is click's."""
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def main() -> None:
    """Run the command line."""
    _settle_signals(sys.argv[1:2])
    _open_standard_streams()
    from cluster.cli import main as run

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        try:
            run(prog_name="dledger")
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS or error.filename is not None:
            raise
        with suppress(OSError):
            sys.stderr.write(f"error: cannot write to standard output: {error.strerror}\n")
        os._exit(1)  # what is still buffered cannot be written either


def _settle_signals(command: list[str]) -> None:
    """Say what a signal does until the command itself catches it.

    A server that is stopped before it has begun has stopped gracefully. The first process of a container has no
    default reaction to signals: without a handler it would go on as if none had come, and be killed when the time for
    stopping is over. For everything else Ctrl-C ends the process; ``KeyboardInterrupt`` would show where an import was.
    """
    if _SERVERS.issuperset(command) and command:
        for number in _STOP_SIGNALS:
            signal.signal(number, _exit_cleanly)
    elif os.getpid() == 1:
        for number in _STOP_SIGNALS:
            signal.signal(number, _exit)
    elif signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if whoever started us ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _exit_cleanly(_number: int, _frame: FrameType | None) -> None:
    os._exit(0)


def _exit(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)


def _open_standard_streams() -> None:
    """Put ``/dev/null`` where a standard stream is closed: the next file or socket would take its number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


if __name__ == "__main__":
    main()
