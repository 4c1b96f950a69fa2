"""Groups of real brokers for the tests, and what every test asks of them in the end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from click.testing import CliRunner

from dledger.types import NodeId
from dledger_cli.cli import main
from dledger_cli.local.brokers import LocalBrokers
from dledger_cli.local.tcp_proxy import LocalProxiedGroup
from rocketstore.client import BrokerStatus, DLedgerError, TopicInfo
from rocketstore.client.aio.received import split_records
from rocketstore.types import BROKER_STATE_TOPIC
from tests.integration.harness import WatchedGroup
from tests.support.broker_history import BrokerHistory
from tests.support.broker_load import TOPIC, BrokerLoad
from tests.support.waiting import wait_until

QUEUES: Final = 4
SMALL_FILES: Final = {
    "mappedFileSizeCommitLog": str(1 << 20),
    "mappedFileSizeConsumeQueue": "4000",  # 200 units: queues have several files
    "maxHashSlotNum": "500",
    "maxIndexNum": "2000",
}


class BrokerGroup(WatchedGroup, LocalBrokers):
    """Brokers with small files. ``verify`` stops them all."""

    def __init__(
        self,
        directory: Path,
        *,
        size: int = 3,
        plain: bool = False,
        flush: str = "sync",
        settings: Mapping[str, str] | None = None,
    ) -> None:
        LocalBrokers.__init__(
            self, directory, size=size, plain=plain, flush=flush, settings={**SMALL_FILES, **(settings or {})}
        )
        self.history = BrokerHistory()
        self.allowed_to_fail: set[NodeId] = set()

    def load(
        self, *, consumers: int = 2, pace_s: float = 0.004, timeout_s: float = 5.0, numbered: bool = False
    ) -> BrokerLoad:
        """A background load on all brokers, recorded in this group's history; one after the other."""
        return BrokerLoad(
            self.addresses,
            self.history,
            queues=QUEUES,
            consumers=consumers,
            pace_s=pace_s,
            timeout_s=timeout_s,
            numbered=numbered,
        )

    def create_topic(self, name: str = TOPIC, queues: int = QUEUES) -> None:
        """Create it and wait until every broker knows."""
        with self.admin(60.0) as admin:
            admin.put_topic(TopicInfo(name, queues, queues, 6))
        self.wait_topic(name)

    def broker_status(self, node: NodeId) -> BrokerStatus:
        """What one broker says of itself, once it answers."""
        answers: dict[NodeId, BrokerStatus] = {}

        def has_answered() -> bool:
            answers.update(self.broker_statuses())
            return node in answers

        wait_until(has_answered, f"{node} answers")
        return answers[node]

    def wait_topic(self, name: str) -> None:
        """Wait until every broker serves reads and knows the topic."""
        wait_until(lambda: all(name in self.topics_of(node) for node in self.nodes), f"every broker knows {name}")

    def topics_of(self, node: NodeId) -> list[str]:
        """The topics that this one broker knows; none before it serves reads."""
        with self.admin(1.0) as admin:
            try:
                return admin.topics_at(self.nodes[node].client_address)
            except DLedgerError:
                return []

    def pull_all(self, node: NodeId, topic: str, queue_id: int) -> list[bytes]:
        """Every record of a queue as this broker has it; their queue offsets have neither gap nor repeat."""
        records: list[bytes] = []
        address = self.nodes[node].client_address
        with self.admin() as admin:
            while True:
                part = admin.read_at(address, topic, queue_id, len(records))
                if not part.messages:
                    assert len(records) == part.max_offset, f"{node}: the queue ends at {part.max_offset}"
                    return records
                offsets = [one.queue_offset for one in part.messages]
                expected = list(range(len(records), len(records) + len(offsets)))
                assert offsets == expected, f"{node}: queue {queue_id} of {topic} holds {offsets}, not {expected}"
                records += [one.record for one in part.messages]

    def wait_dispatched(self) -> None:
        """Every broker runs, and has all that is committed in its queues."""
        wait_until(
            lambda: (
                len(all_ := self.broker_statuses()) == len(self.nodes)
                and not any(one.runtime.dispatch_behind for one in all_.values())
            ),
            "every broker has dispatched",
        )

    def verify(self, topic: str = TOPIC, queues: int = QUEUES) -> dict[int, list[bytes]]:
        """The verdict: ``verified_bodies``, and the queues explain what every client was told."""
        bodies = self.verified_bodies(topic, queues)
        complaints = self.history.complaints(bodies)
        assert not complaints, "\n".join(complaints)
        return bodies

    def verified_bodies(self, topic: str = TOPIC, queues: int = QUEUES) -> dict[int, list[bytes]]:
        """The bodies of each queue; all brokers are stopped for it.

        All brokers hold the same log, the same queues and the same index, byte for byte; every file is sound when all
        have stopped.
        """
        if not self.plain:
            digests = self.digests()
            assert len(set(digests.values())) == 1, f"the logs differ: {digests}"
        self.wait_dispatched()
        self.wait_topic(topic)
        stored = {node: {one: self.pull_all(node, topic, one) for one in range(queues)} for node in self.nodes}
        records = next(iter(stored.values()))
        assert all(one == records for one in stored.values()), "the brokers answer pulls differently"
        bodies = {queue: [one.body for one in split_records(b"".join(all_))] for queue, all_ in records.items()}
        self.check_files()
        return bodies

    def check_files(self) -> None:
        """Stop all; then queues and index must be alike on all brokers, and every log sound."""
        master = self.master()  # last, so that nobody is elected and writes once more
        codes = {node: self.stop(node) for node in (*self.followers(master), master)}
        assert set(codes.values()) == {0}, codes
        queues = {node: _files(self.root_dir(node) / "consumequeue") for node in self.nodes}
        indexes = {node: list(_files(self.root_dir(node) / "index").values()) for node in self.nodes}
        first = next(iter(self.nodes))
        for node in self.nodes:
            differing = {
                path
                for path in queues[node].keys() | queues[first].keys()
                if not _are_alike(path, queues[node].get(path, b""), queues[first].get(path, b""))
            }
            assert not differing, f"consume queues of {first} and {node} differ: {sorted(differing)}"
            assert indexes[node] == indexes[first], f"the indexes of {first} and {node} differ"
            if not self.plain:
                result = CliRunner().invoke(main, ["inspect", str(self.store_dir(node))])
                assert result.exit_code == 0, result.output


class ProxiedBrokers(LocalProxiedGroup, BrokerGroup):
    """Brokers that reach each other only through a ``ProxyNetwork``."""


def _files(directory: Path) -> dict[str, bytes]:
    """Every file below, by its path from there."""
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()
    }


def _are_alike(path: str, one: bytes, other: bytes) -> bool:
    """The same; but the master may note its own progress after the first of them has stopped."""
    shorter, longer = sorted((one.rstrip(b"\0"), other.rstrip(b"\0")), key=len)
    return one == other or (path.startswith(f"{BROKER_STATE_TOPIC}/") and longer.startswith(shorter))
