"""Entry point of the ``dledger`` command: what must happen before ``dledger_cli.cli`` is loaded."""

from __future__ import annotations

import errno
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Final

_SERVERS: Final = frozenset({"broker", "console", "nameserver", "serve"})
_OUTPUT_ERRORS: Final = frozenset({errno.ENOSPC, errno.EIO, errno.EBADF, errno.EFBIG, errno.EDQUOT})
"""Write errors without a name in this module."""
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def main() -> None:
    """Run the command line."""
    _settle_signals(sys.argv[1:2])
    _open_standard_streams()
    from dledger_cli.cli import main as run

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        try:
            run(prog_name="dledger")
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # only what was left in the buffer
        os._exit(128 + signal.SIGPIPE)
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS or error.filename is not None:
            raise
        with suppress(OSError):
            sys.stderr.write(f"error: cannot write to standard output: {error.strerror}\n")
        os._exit(1)  # the remaining buffer cannot be written either


def _settle_signals(command: list[str]) -> None:
    """Set the reaction to signals until the command itself handles them.

    A server that is stopped before it starts serving has stopped gracefully. The first process of a container has no
    default reaction to signals: without a handler it would continue, and be killed at the end of the stop timeout.
    Other commands end at Ctrl-C; ``KeyboardInterrupt`` would print a traceback from an import.
    """
    if _SERVERS.issuperset(command) and command:
        for number in _STOP_SIGNALS:
            signal.signal(number, _exit_cleanly)
    elif os.getpid() == 1:
        for number in _STOP_SIGNALS:
            signal.signal(number, _exit)
    elif signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if our parent ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _exit_cleanly(_number: int, _frame: FrameType | None) -> None:
    os._exit(0)


def _exit(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)


def _open_standard_streams() -> None:
    """Open ``/dev/null`` for closed standard streams; otherwise the next file or socket would get their numbers."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


if __name__ == "__main__":
    main()
