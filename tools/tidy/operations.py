"""Runs a group and a broker in this process, on loopback, and records the calls of an append and a send."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dledger.client import DLedgerClient
from dledger.config import Member, ServerConfig, StoreConfig
from dledger.server import DLedgerServer
from dledger.types import NodeId, Role, Term
from dledger_cli.local.group import free_ports
from rocketstore.client.aio.received import ConsumedMessage
from rocketstore.client.blocking import Producer
from rocketstore.client.blocking_consumer import Consumer
from rocketstore.message.message import Message
from rocketstore.server import BrokerServer
from rocketstore.settings import load_broker_settings
from tools.tidy.calls import NotedCall, Recorder, record

TIMEOUT_S: Final = 120.0
SETTLED_S_MAX: Final = 60.0
TOPIC: Final = "walks"
_SETTLED_AFTER: Final = 20
"""Warm-up operations, after which connections, streams and segments exist."""
_SMALL: Final = {
    "mappedFileSizeCommitLog": "1m",
    "maxHashSlotNum": "100",
    "maxIndexNum": "1000",
    "mappedFileSizeConsumeQueue": "20000",
    "index_segment_bytes": "32000",
}


@dataclass(frozen=True, slots=True)
class WatchedAppends:
    """The calls of each append in a group of three; thread names contain ``leader`` and ``followers``."""

    leader: NodeId
    followers: tuple[NodeId, ...]
    calls: tuple[list[NotedCall], ...]

    def of_leader(self, part: str = "") -> list[list[NotedCall]]:
        """The calls by the leader's threads; with ``part``, by the thread of that name."""
        thread = f"{part}-{self.leader}"
        return [[call for call in calls if call.thread.partition("_")[0].endswith(thread)] for calls in self.calls]


def watch_appends(directory: Path, count: int) -> WatchedAppends:
    """Append ``count`` entries, one after the other, through the blocking client."""
    with ExitStack() as stack:
        recorder = stack.enter_context(record())
        servers = [stack.enter_context(_member(config)) for config in _group(directory)]
        client = stack.enter_context(
            closing(DLedgerClient([one.client_address for one in servers], timeout_s=TIMEOUT_S))
        )
        for _ in range(_SETTLED_AFTER):
            client.append(b"x" * 100)

        def append() -> tuple[Term, list[NotedCall]]:
            terms: list[Term] = []
            calls = recorder.during(lambda: terms.append(client.append(b"x" * 100).term))
            return terms[0], calls

        def leader_of(term: Term) -> NodeId | None:
            statuses = [one.status() for one in servers]
            return next((one.node_id for one in statuses if one.role is Role.LEADER and one.term == term), None)

        leader, calls = under_one_leader(append, leader_of, count)
        followers = tuple(one.config.node_id for one in servers if one.config.node_id != leader)
        return WatchedAppends(leader, followers, calls)


def under_one_leader(
    append: Callable[[], tuple[Term, list[NotedCall]]], leader_of: Callable[[Term], NodeId | None], count: int
) -> tuple[NodeId, tuple[list[NotedCall], ...]]:
    """The calls of ``count`` appends in a row within one term, and its leader.

    Elsewhere in the group, and while it moves, an append takes other ways. Raises ``TimeoutError`` if it keeps moving.
    """
    deadline = time.monotonic() + SETTLED_S_MAX
    kept: list[list[NotedCall]] = []
    current: Term | None = None
    while time.monotonic() < deadline:
        term, calls = append()
        if term == current:
            kept.append(calls)
        else:  # the first one found its leader, or was sent twice
            current, kept = term, []
        if len(kept) >= count and (leader := leader_of(term)) is not None:
            return leader, tuple(kept[-count:])
    raise TimeoutError(f"no leader lasted for {count} appends within {SETTLED_S_MAX:g} s: is this machine overloaded?")


def watch_sends(directory: Path, count: int) -> list[list[NotedCall]]:
    """Send ``count`` messages, one after the other, to a broker that is the only member of its group.

    Work that the broker's own threads do after the acknowledgement is left out.
    """
    with _brokered(directory) as (recorder, producer, _address):
        calls = [recorder.during(lambda: producer.send(Message(TOPIC, b"x" * 100))) for _ in range(count)]
        return [[call for call in one if not call.thread.startswith("rocketstore-")] for one in calls]


def watch_deliveries(directory: Path, count: int) -> list[list[NotedCall]]:
    """Send a message and wait until a consumer that is already pulling has received it; ``count`` times."""
    with (
        _brokered(directory) as (recorder, producer, address),
        Consumer([address], group="walkers", topics=TOPIC, start="first", timeout_s=TIMEOUT_S) as consumer,
    ):
        left = _SETTLED_AFTER
        while left:
            left -= len(_polled(consumer))

        def deliver() -> None:
            producer.send(Message(TOPIC, b"the one"))
            _polled(consumer)

        return [recorder.during(deliver) for _ in range(count)]


def _polled(consumer: Consumer) -> list[ConsumedMessage]:
    messages = consumer.poll(timeout_s=TIMEOUT_S)
    if not messages:
        raise TimeoutError("a message was not delivered")
    return messages


def _group(directory: Path) -> list[ServerConfig]:
    members = tuple(Member(NodeId(f"n{number}"), "127.0.0.1", port) for number, port in enumerate(free_ports(3)))
    store = StoreConfig(base_dir=directory, segment_bytes=1 << 20, index_segment_bytes=1 << 19)
    return [ServerConfig(node_id=one.node_id, members=members, client_port=0, store=store) for one in members]


@contextmanager
def _member(config: ServerConfig) -> Iterator[DLedgerServer]:
    server = DLedgerServer(config)
    try:
        yield server.start()
    finally:
        server.stop(graceful=False)


@contextmanager
def _brokered(directory: Path) -> Iterator[tuple[Recorder, Producer, str]]:
    """A recorder, a producer that has sent some messages, and the broker's address."""
    peer_port, listen_port = free_ports(2)
    group = {"enableDLegerCommitLog": "true", "dLegerGroup": "g", "dLegerSelfId": "n0"}
    ports = {
        "dLegerPeers": f"n0-127.0.0.1:{peer_port}",
        "listenPort": str(listen_port),
        "vipPort": "0",
    }
    config, _ = load_broker_settings(None, {}, {"storePathRootDir": str(directory), **_SMALL, **group, **ports})
    with record() as recorder:
        server = BrokerServer(config)
        try:
            server.start()
            with Producer([server.address], timeout_s=TIMEOUT_S) as producer:
                for _ in range(_SETTLED_AFTER):
                    producer.send(Message(TOPIC, b"x" * 100))
                yield recorder, producer, server.address
        finally:
            server.stop()
