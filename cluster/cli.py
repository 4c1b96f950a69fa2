"""``dledger``: run nodes, write and read the log, look after a group; run brokers, send and consume messages.

Exit codes: 0 done, 1 failed, 2 wrong usage or settings, 3 the outcome of a write is unknown.
"""

from __future__ import annotations

import os

import click

from cluster.commands.access import access
from cluster.commands.certs import certs
from cluster.commands.console import console
from cluster.commands.drill import drill
from cluster.commands.group import status, transfer_leader
from cluster.commands.health import health
from cluster.commands.inspection import inspect
from cluster.commands.log import append, get, tail
from cluster.commands.mq_broker import broker, cluster
from cluster.commands.mq_consumer import consumer
from cluster.commands.mq_message import message
from cluster.commands.mq_topic import topic
from cluster.commands.pipeline import pipeline
from cluster.commands.serve import serve
from cluster.commands.tools import bench, demo
from cluster.commands.verify import verify
from cluster.reporting import ErrorReportingGroup


@click.group(
    cls=ErrorReportingGroup,
    writing=frozenset({"append", "transfer-leader"}),
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


_LOG = (serve, append, get, tail, status, health, transfer_leader, inspect, verify, console, bench, demo, drill)
_BROKER = (broker, cluster, topic, message, consumer)
_SECURITY = (access, certs)
_DATA = (pipeline,)
for _command in (*_LOG, *_BROKER, *_SECURITY, *_DATA):
    main.add_command(_command)


if __name__ == "__main__":
    main(prog_name="dledger")
