"""``dledger``: run nodes, write and read the log, look after a group.

Exit codes: 0 done, 1 failed, 2 wrong usage or settings, 3 the outcome of a write is unknown.
"""

from __future__ import annotations

import os

import click

from cluster.commands.broker import broker
from cluster.commands.group import status, transfer_leader
from cluster.commands.inspection import inspect
from cluster.commands.log import append, get, tail
from cluster.commands.serve import serve
from cluster.commands.tools import bench, demo
from dledger.errors import ConfigError, DLedgerError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNKNOWN_OUTCOME = 3

_WRITING = frozenset({"append", "transfer-leader"})


class ErrorReportingGroup(click.Group):
    """Turns the project's errors into a sentence on standard error and an exit code; no traceback."""

    def invoke(self, context: click.Context) -> object:
        """Run the command."""
        try:
            return super().invoke(context)
        except ConfigError as error:
            for problem in error.problems:
                click.echo(f"error: {problem}", err=True)
            context.exit(EXIT_USAGE)
        except DLedgerError as error:
            click.echo(f"error: {error}", err=True)
            unknown = error.outcome == "unknown" and context.invoked_subcommand in _WRITING
            if unknown:
                click.echo(
                    "The outcome is unknown: it may or may not have happened. Look before you repeat it.", err=True
                )
            context.exit(EXIT_UNKNOWN_OUTCOME if unknown else EXIT_FAILED)


@click.group(
    cls=ErrorReportingGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Start with: dledger demo",
)
@click.version_option(package_name="dledger", message="%(prog)s %(version)s")
def main() -> None:
    """A Raft-replicated commit log: an ordered, durable log on several nodes that survives losing some of them.

    Exit codes: 0 done, 1 failed, 2 wrong usage or settings, 3 the outcome of a write is unknown.
    """
    # gRPC's C core otherwise tells people about every connection that a stopped node closes.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


for _command in (serve, broker, append, get, tail, status, transfer_leader, inspect, bench, demo):
    main.add_command(_command)


if __name__ == "__main__":
    main(prog_name="dledger")
