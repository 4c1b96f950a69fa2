"""Members of a group with a replicated commit log each, in this process, for tests."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from dledger.clock import Clock
from dledger.config import ElectionConfig, FlushMode, Member, ReplicationConfig, ServerConfig, StoreConfig
from dledger.server import DLedgerServer
from dledger.types import NodeId, Role
from dledger_cli.local.group import free_ports
from rocketstore.commit_log.replicated import MESSAGES, ReplicatedCommitLog, for_broker
from rocketstore.config import MessageStoreConfig
from rocketstore.message.message import Message
from rocketstore.types import PutResult, RecordHead
from tests.support.waiting import wait_until

SEGMENT_BYTES = 16 * 1024
QUICK = ElectionConfig(heartbeat_interval_ms=50, election_timeout_ms_min=200, election_timeout_ms_max=400)


def members_of(size: int) -> tuple[Member, ...]:
    """Members n0, n1, ... on free ports."""
    return tuple(Member(NodeId(f"n{number}"), "127.0.0.1", port) for number, port in enumerate(free_ports(size)))


def node_config(
    base_dir: Path,
    members: tuple[Member, ...],
    number: int = 0,
    *,
    segment_bytes: int = SEGMENT_BYTES,
    ack_timeout_ms: int = 2500,
    election: ElectionConfig = QUICK,
) -> ServerConfig:
    """A broker's node with small segments that does not wait for disks."""
    return for_broker(
        ServerConfig(
            node_id=members[number].node_id,
            members=members,
            client_port=0,
            election=election,
            replication=ReplicationConfig(ack_timeout_ms=ack_timeout_ms),
            store=StoreConfig(
                base_dir, segment_bytes=segment_bytes, index_segment_bytes=32 * 1024, flush_mode=FlushMode.ASYNC
            ),
        )
    )


class Replica:
    """One member and its commit log; ``lead`` waits until it leads and opens its term."""

    def __init__(self, config: ServerConfig, clock: Clock | None = None) -> None:
        self.server = DLedgerServer(config, bodies=MESSAGES)
        self.log = ReplicatedCommitLog(self.server, MessageStoreConfig(), clock=clock)

    def start(self) -> Replica:
        self.log.load(clean_stop=True)
        self.log.start()
        return self

    def stop(self) -> None:
        """At once, without handing over; the log's own ``shutdown`` finds nothing more to do."""
        self.server.stop(graceful=False)
        self.log.shutdown()

    @property
    def leads(self) -> bool:
        return self.server.status().role is Role.LEADER

    def lead(self) -> Replica:
        wait_until(lambda: self.leads, "it leads")
        self.log.open_term(self.server.status().term)
        return self

    def put(self, *messages: Message) -> Sequence[PutResult]:
        """The results of one batch, waited for."""
        done, results = threading.Event(), list[PutResult]()

        def finish(found: Sequence[PutResult]) -> None:
            assert not done.is_set(), "told twice"
            results.extend(found)
            done.set()

        self.log.submit(messages, finish)
        assert done.wait(60), "no result"
        assert len(results) == len(messages)
        return results

    def heads(self, offset: int = 0, bytes_max: int = 1 << 20) -> list[RecordHead]:
        """Every record from ``offset`` on."""
        found: list[RecordHead] = []
        while True:
            scanned = self.log.scan(offset, bytes_max)
            found += scanned.heads
            if scanned.next_offset == offset:
                return found
            offset = scanned.next_offset


def message(body: bytes = b"hello", queue_id: int = 0, topic: str = "TopicTest") -> Message:
    return Message(topic, body, queue_id, {"TAGS": "TagA"})
