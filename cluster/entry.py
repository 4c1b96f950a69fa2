"""Where the ``dledger`` command begins: ``cluster.cli``, and before it what cannot wait until that is loaded."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Run the command line."""
    if os.getpid() == 1:
        # The first process of a container has no default reaction to signals: until a server catches them, it would
        # go on as if none had come, and be killed after the time that is given for stopping.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _exit)
    if sys.argv[1:2] == ["health"]:
        from cluster.commands.health import health
        from cluster.reporting import ErrorReportingGroup

        # Loading the other commands takes longer than asking, and a container's engine asks every few seconds.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        names = {"help_option_names": ["-h", "--help"]}
        ErrorReportingGroup(commands={"health": health}, context_settings=names)(prog_name="dledger")
    from cluster.cli import main as run

    run(prog_name="dledger")


def _exit(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)


if __name__ == "__main__":
    main()
