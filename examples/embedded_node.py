"""A replicated map within a Python program: a member of a group in this process, and a state made of its log.

``python examples/embedded_node.py /tmp/map colour=blue size=7``; three, each in a terminal, with ``--id n0`` to ``n2``:
``--members 'n0-127.0.0.1:20911;n1-127.0.0.1:20921;n2-127.0.0.1:20931'``. It appends these, makes the map of all
that is committed, by earlier runs too, and prints it. A real program would stay, and use ``client.follow``.
"""

import argparse
from contextlib import ExitStack
from pathlib import Path

from dledger.client import DLedgerClient
from dledger.config import ServerConfig, StoreConfig, parse_members
from dledger.server import DLedgerServer
from dledger.types import Magic, NodeId

parser = argparse.ArgumentParser(description="A replicated map.")
parser.add_argument("directory", type=Path, help="where the log is kept")
parser.add_argument("assignments", nargs="+", metavar="NAME=VALUE")
parser.add_argument("--id", default="n0", help="which of the members this one is")
parser.add_argument("--members", default="n0-127.0.0.1:20911", help="the same for all of them")
given = parser.parse_args()
members = parse_members(given.members)
store = StoreConfig(given.directory)
node = DLedgerServer(ServerConfig("map", NodeId(given.id), members, client_port=0, store=store))  # 0: any free port
with ExitStack() as ending:
    ending.callback(node.stop)
    node.start()
    client = ending.enter_context(DLedgerClient(node.client_address, group="map", timeout_s=30.0))
    last = client.append_many([text.encode() for text in given.assignments])[-1].index
    state = {}
    for entry in client.follow(client.metadata().begin_index):
        if entry.magic is Magic.NORMAL:  # others are the log's own
            name, _, state[name] = entry.body.decode().partition("=")
        if entry.index == last:
            break
for name, value in sorted(state.items()):
    print(f"{name}={value}")
