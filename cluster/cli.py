"""``dledger``: runs nodes, writes and reads the log, manages a group; runs brokers, sends and consumes messages.

Exit codes: 0 done, 1 failed, 2 wrong usage or settings, 3 the outcome of a write is unknown.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Final

import click

from cluster.reporting import ErrorReportingGroup

MODULES: Final = {
    "access": "access",
    "append": "log",
    "bench": "bench",
    "broker": "mq_broker",
    "certs": "certs",
    "cluster": "mq_broker",
    "console": "console",
    "consumer": "mq_consumer",
    "demo": "demo",
    "drill": "drill",
    "get": "log",
    "ha": "ha",
    "health": "health",
    "inspect": "inspection",
    "message": "mq_message",
    "nameserver": "nameserver",
    "pipeline": "pipeline",
    "restore-vote": "restoring",
    "serve": "serve",
    "status": "group",
    "tail": "log",
    "topic": "mq_topic",
    "transfer-leader": "group",
    "upgrade": "upgrade",
    "verify": "verify",
}
"""Maps each command to its module in ``cluster.commands``."""


class _Commands(ErrorReportingGroup):
    """Loads a command on demand: loading all of them takes longer than running most of them."""

    def list_commands(self, _context: click.Context) -> list[str]:
        return list(MODULES)

    def get_command(self, _context: click.Context, name: str) -> click.Command | None:
        module = MODULES.get(name)
        if module is None:
            return None
        command = getattr(import_module(f"cluster.commands.{module}"), name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command


@click.group(
    cls=_Commands,
    writing=frozenset({"append", "transfer-leader"}),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Start with: dledger demo",
)
@click.version_option(package_name="dledger", message="%(prog)s %(version)s")
@click.pass_context
def main(context: click.Context) -> None:
    """A Raft-replicated commit log: an ordered, durable log on several nodes that survives losing some of them.

    Exit codes: 0 done, 1 failed, 2 wrong usage or settings, 3 the outcome of a write is unknown.
    """
    # Otherwise gRPC's C core prints a message for every connection closed by a stopped node.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE" if context.invoked_subcommand == "health" else "ERROR")


if __name__ == "__main__":
    main(prog_name="dledger")
