"""Three members, each with a log, a store reduced to its queue counters, and the real change of roles.

What must hold after any failover (RocketMQ issue 7689: a queue offset given twice): in every queue the offsets are 0,
1, 2, ... without gap or repeat, on every member alike, and every message that was told to be stored is there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dledger.config import ServerConfig
from dledger.types import Role
from rocketstore.broker.role_change import BrokerRoleChange
from rocketstore.message.record import decode_record
from rocketstore.types import BrokerRole, PutResult
from tests.support.waiting import wait_until
from tests.unit.rocketstore.commit_log.replicas import Replica, members_of, message, node_config

QUEUES = 2


class Broker:
    """A member with the least of a message store: a gate, and a dispatch that counts queue offsets when asked."""

    def __init__(self, config: ServerConfig) -> None:
        self.replica = Replica(config)
        self.log = self.replica.log
        self.master = True
        parts: Any = self  # in the place of store, state and schedule
        self.roles = BrokerRoleChange(
            self.replica.server, self.log, parts, parts, parts, name=config.node_id, listener=lambda _role: None
        )
        self.replica.server.add_role_change_handler(self.roles)
        self.replica.start()

    def become_slave(self) -> None:
        self.master = False

    def become_master(self, role: BrokerRole) -> None:
        assert role is BrokerRole.SYNC_MASTER
        self.master = True

    def rebuild_queue_offsets(self) -> None:
        assert self.log.max_offset == self.log.end_offset
        heads = self.replica.heads()
        self.log.set_queue_offsets({(one.topic, one.queue_id): one.queue_offset + 1 for one in heads})

    @property
    def dispatch_damage(self) -> None:
        return None

    def wait_dispatched(self, timeout: float) -> bool:
        return timeout > 0

    def catch_up(self, *, cancelled: threading.Event) -> None: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def shutdown(self) -> None:
        self.replica.stop()
        assert not self.master
        assert not self.roles._thread.is_alive()


class Group:
    """The brokers that run, and producers that put to whoever is master."""

    def __init__(self, base_dir: Path) -> None:
        members = members_of(3)
        self.configs = [node_config(base_dir / str(number), members, number) for number in range(3)]
        self.brokers: dict[int, Broker] = {number: Broker(config) for number, config in enumerate(self.configs)}
        self.confirmed: list[bytes] = []
        self._numbers = iter(range(1 << 20))

    def master(self) -> tuple[int, Broker]:
        wait_until(lambda: any(one.master for one in self.brokers.values()), "there is a master")
        found = [pair for pair in self.brokers.items() if pair[1].master]
        return found[-1] if found else self.master()

    def stop(self, number: int) -> None:
        self.brokers.pop(number).shutdown()

    def start(self, number: int) -> None:
        self.brokers[number] = Broker(self.configs[number])

    def put(self, broker: Broker) -> threading.Event:
        """Put a batch, one message per queue, without waiting; the event tells the end."""
        bodies = [b"%d" % next(self._numbers) for _ in range(QUEUES)]
        done = threading.Event()

        def finish(results: Sequence[PutResult]) -> None:
            self.confirmed += [body for body, result in zip(bodies, results, strict=True) if result.ok]
            done.set()

        broker.log.submit([message(body, queue_id) for queue_id, body in enumerate(bodies)], finish)
        return done

    def put_some(self, count: int) -> None:
        """Batches to the master, one after the other, until ``count`` more were stored."""
        wanted = len(self.confirmed) + count * QUEUES
        while len(self.confirmed) < wanted:
            assert self.put(self.master()[1]).wait(60)

    def check(self) -> None:
        """What must hold."""
        _, master = self.master()
        heads = master.replica.heads()
        for queue_id in range(QUEUES):
            offsets = [head.queue_offset for head in heads if head.queue_id == queue_id]
            assert offsets == list(range(len(offsets)))
        bodies = {decode_record(master.log.read_record(head.offset) or b"").body for head in heads}
        assert bodies >= set(self.confirmed)
        for broker in self.brokers.values():
            wait_until(lambda broker=broker: broker.replica.heads() == heads, "all members hold the same")  # type: ignore[misc]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    group = Group(tmp_path)
    for broker in group.brokers.values():  # a group that has lost one of two disks with standing would stop
        wait_until(lambda broker=broker: broker.replica.server.status().voter, "every new disk has standing")  # type: ignore[misc]
    yield group
    for number in list(group.brokers):
        group.stop(number)


def test_the_leader_becomes_master_and_nobody_else(group: Group) -> None:
    """Without a single put: its NOOP is what it waits for."""
    _, master = group.master()

    assert master.replica.server.status().role is Role.LEADER
    assert sum(one.master for one in group.brokers.values()) == 1
    group.put_some(5)
    group.check()


def test_queue_offsets_go_on_after_the_master_is_gone(group: Group) -> None:
    """Also those of the batches that were under way, whether they survived or not."""
    for _ in range(3):
        group.put_some(5)
        number, master = group.master()
        under_way = [group.put(master) for _ in range(20)]
        group.stop(number)
        assert all(done.wait(60) for done in under_way)
        group.put_some(5)
        group.start(number)
        group.check()


def test_queue_offsets_go_on_after_leadership_was_handed_over(group: Group) -> None:
    """To and fro, under puts, so that every member uses its own old table if it can."""
    stop = threading.Event()

    def produce() -> None:
        while not stop.is_set():
            group.put(group.master()[1]).wait(60)

    producer = threading.Thread(target=produce)
    producer.start()
    try:
        for _ in range(4):
            number, master = group.master()
            master.replica.server.submit_transfer(None, lambda _result: None)
            wait_until(lambda master=master: not master.master, f"n{number} is a slave")  # type: ignore[misc]
    finally:
        stop.set()
        producer.join()

    group.put_some(5)
    group.check()
