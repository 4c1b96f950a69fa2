"""Fake nodes behind real client ports, sharing one log: what a client sees of a group, without replication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dledger.config import ServerConfig, StoreConfig
from dledger.errors import LeaderHint
from dledger.host import ClientServer
from dledger.rpc.ports import MemberStatus
from dledger.types import NodeId
from dledger_cli.local.group import free_ports
from tests.support.fake_node import FakeNode, client_server


@dataclass
class FakeGroup:
    """``nodes[0]`` leads at first."""

    nodes: list[FakeNode]
    servers: list[ClientServer]
    configs: list[ServerConfig]
    advertised: list[str]
    """Where the nodes say that they are."""

    @property
    def addresses(self) -> list[str]:
        """Where the nodes listen, dead or alive."""
        return [f"127.0.0.1:{config.client_port}" for config in self.configs]

    def elect(self, leader: int) -> None:
        """Make one node the leader, in a new term; all know it, and have the present leader's log."""
        elect(self.nodes, self.advertised, leader)

    def kill(self, number: int) -> None:
        """Close a node's port."""
        self.servers[number].close()

    def restart(self, number: int) -> None:
        """Open it again."""
        self.servers[number] = client_server(self.configs[number], self.nodes[number])
        self.servers[number].start()


def elect(nodes: Sequence[FakeNode], addresses: Sequence[str], leader: int) -> None:
    """See ``FakeGroup.elect``."""
    hint = LeaderHint(nodes[leader].node_id, addresses[leader])
    source = next((node for node in nodes if node.leader is None), nodes[0])
    term, entries, committed = source.term, source.entries, source.committed
    producers = source.producers
    for number, node in enumerate(nodes):
        node.term, node.entries, node.committed = term, list(entries), committed
        node.producers = {name: list(places) for name, places in producers.items()}
        node.become(None if number == leader else hint)


@contextmanager
def fake_group(
    count: int = 3, *, max_entry_bytes: int = 4 << 20, advertised: Sequence[str] = ()
) -> Iterator[FakeGroup]:
    """``count`` nodes on free ports, which say that they are there or at ``advertised``."""
    store = StoreConfig(max_entry_bytes=max_entry_bytes)
    # All use the default configuration's single member: a client server needs no more of it than the host.
    configs = [ServerConfig(client_port=port, store=store) for port in free_ports(count)]
    said = list(advertised or (f"127.0.0.1:{one.client_port}" for one in configs))
    members = tuple(
        MemberStatus(NodeId(f"n{number}"), f"127.0.0.1:{20911 + number}", one) for number, one in enumerate(said)
    )
    nodes = [FakeNode(node_id=member.node_id, members=members) for member in members]
    servers = [client_server(config, node) for config, node in zip(configs, nodes, strict=True)]
    group = FakeGroup(nodes, servers, configs, said)
    try:
        for server in servers:
            server.start()
        group.elect(0)
        yield group
    finally:
        for server in group.servers:
            server.close()
