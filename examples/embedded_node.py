"""A replicated map within a Python program: a member of a group in this process, and a state made of its log.

One node alone::

    python examples/embedded_node.py /tmp/map colour=blue size=7

Three, each in a terminal of its own, with ``--id n1`` and ``n2`` (an assignment waits until two of them run)::

    python examples/embedded_node.py /tmp/map --id n0 \\
        --members 'n0=127.0.0.1:20911,n1=127.0.0.1:20912,n2=127.0.0.1:20913' colour=blue

It appends the assignments, makes the map of everything that is committed, and prints it. Started again, it has the map
of all runs. A real program would stay, and keep its map up to date with ``client.follow``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from dledger.client import DLedgerClient
from dledger.config import Member, ServerConfig, StoreConfig
from dledger.server import DLedgerServer
from dledger.types import LogIndex, Magic, NodeId


def member_of(text: str) -> Member:
    """``n0=127.0.0.1:20911``: its id, and where its peers find it."""
    name, _, address = text.partition("=")
    host, _, port = address.rpartition(":")
    return Member(NodeId(name), host, int(port))


def map_of(client: DLedgerClient, last: LogIndex) -> dict[str, str]:
    """The log is the truth: every member that applies its entries in order has the same map."""
    state: dict[str, str] = {}
    first: int = client.metadata().begin_index
    while first <= last:
        entries = client.read(LogIndex(first), count=min(1000, last + 1 - first))  # linearizable: the leader confirms
        for entry in entries:
            if entry.magic is Magic.NORMAL:  # others are the log's own
                name, _, value = entry.body.decode().partition("=")
                state[name] = value
        first = entries[-1].index + 1
    return state


def main(words: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="A replicated map.")
    parser.add_argument("directory", type=Path, help="where the log is kept")
    parser.add_argument("assignments", nargs="+", metavar="NAME=VALUE")
    parser.add_argument("--id", default="n0", help="which of the members this one is")
    parser.add_argument("--members", default="n0=127.0.0.1:20911", help="ID=HOST:PORT,…; the same for all of them")
    arguments = parser.parse_args(words)
    config = ServerConfig(
        group="map",
        node_id=NodeId(arguments.id),
        members=tuple(member_of(text) for text in arguments.members.split(",")),
        client_port=0,  # any free one: clients learn from one member where the others are
        store=StoreConfig(arguments.directory),
    )
    node = DLedgerServer(config)  # opens the directory, which is its own from now on
    try:
        node.start()
        with DLedgerClient(node.client_address, group="map", timeout_s=30.0) as client:
            results = client.append_many([text.encode() for text in arguments.assignments])
            for name, value in sorted(map_of(client, results[-1].index).items()):
                print(f"{name}={value}")
    finally:
        node.stop()


if __name__ == "__main__":
    main()
