"""A node or a broker in the test's own process, the only member of its group, for Spark to read and write."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dledger.client import DLedgerClient
from dledger.config import Member, ServerConfig, StoreConfig
from dledger.server import DLedgerServer
from dledger.types import NodeId, Role
from dledger_cli.local.group import free_ports
from rocketstore.client.blocking import Producer
from rocketstore.message.message import Message
from rocketstore.server import BrokerServer
from rocketstore.settings import load_broker_settings
from rocketstore.types import BrokerRole
from tests.support.waiting import wait_until

SEGMENT_BYTES: Final = 1 << 16
LONG_AGO_S: Final = 1_000_000_000


class EntryNode:
    """A group of one whose entries are plain bytes; segments of 64 KiB, so that there are several soon."""

    def __init__(self, directory: Path, cluster_id: str) -> None:
        self.directory = directory
        node_id = NodeId("n0")
        every_hour = tuple(range(24))
        store = StoreConfig(directory, segment_bytes=SEGMENT_BYTES, index_segment_bytes=1 << 13, delete_hour=every_hour)
        peer_port, client_port = free_ports(2)
        config = ServerConfig(
            node_id=node_id,
            members=(Member(node_id, "127.0.0.1", peer_port),),
            cluster_id=cluster_id,
            client_port=client_port,
            store=store,
        )
        self.server = DLedgerServer(config)

    @property
    def options(self) -> dict[str, str]:
        """What Spark is told of it."""
        return {"bootstrap.servers": self.server.client_address}

    def append(self, first: int, count: int, padding: int = 0) -> None:
        """Entries whose bodies are numbers."""
        with DLedgerClient(self.server.client_address, enable_idempotence=False) as client:  # no entries of its own
            client.append_many([f"{number}".encode().ljust(padding) for number in range(first, first + count)])

    def expire(self) -> int:
        """Let all segments before the log's end expire, wait until they are gone; gives the first entry that is left.

        The one after the end may be there already, or its file being made in advance.
        """
        end = self.server.status().end_position
        data = [path for path in (self.directory / "dledger-n0" / "data").iterdir() if path.name.isdecimal()]
        expired = [path for path in data if int(path.name) + SEGMENT_BYTES <= end]
        for path in expired:
            os.utime(path, (LONG_AGO_S, LONG_AGO_S))
        wait_until(lambda: not any(path.exists() for path in expired), "the oldest segments are removed")
        return self.server.status().begin_index


@contextmanager
def entry_node(directory: Path, cluster_id: str = "c1") -> Iterator[EntryNode]:
    """A running node, until the end of the block."""
    node = EntryNode(directory, cluster_id)
    try:
        node.server.start()
        wait_until(lambda: node.server.status().role is Role.LEADER, "it leads itself")
        yield node
    finally:
        node.server.stop()


class BrokerNode:
    """A replicated broker, alone in its group; ``settings`` by their names."""

    def __init__(self, directory: Path, **settings: str) -> None:
        peer_port, listen_port = free_ports(2)
        flags = {
            "storePathRootDir": str(directory),
            "enableDLegerCommitLog": "true",
            "dLegerGroup": "G",
            "dLegerSelfId": "n0",
            "dLegerPeers": f"n0-127.0.0.1:{peer_port}",
            "listenPort": str(listen_port),
            "vipPort": "0",
            "index_segment_bytes": "32000",
            "warm_bytes": "0",
            "mappedFileSizeCommitLog": "1m",
            "maxHashSlotNum": "100",
            "maxIndexNum": "400",
            "mappedFileSizeConsumeQueue": "20000",
            **settings,
        }
        self.server = BrokerServer(load_broker_settings(None, {}, flags)[0])

    @property
    def options(self) -> dict[str, str]:
        """What Spark is told of it."""
        return {"bootstrap.servers": self.server.address, "group": "G"}

    def log_end(self) -> int:
        """The index of the last entry."""
        node = self.server.node
        return -1 if node is None else node.status().end_index

    def send(self, topic: str, first: int, count: int) -> None:
        """Messages whose bodies are numbers."""
        with Producer(self.server.address) as producer:
            producer.send_many([Message(topic, f"{number}".encode()) for number in range(first, first + count)])


@contextmanager
def broker_node(directory: Path, **settings: str) -> Iterator[BrokerNode]:
    """A broker that takes messages, until the end of the block."""
    node = BrokerNode(directory, **settings)
    try:
        node.server.start()
        wait_until(lambda: node.server.store.role is not BrokerRole.SLAVE, "it is master")
        yield node
    finally:
        node.server.stop()
