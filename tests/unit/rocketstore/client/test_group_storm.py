"""Members come, go, hang and die while brokers lose their masters and routes, in random order: nothing is missed."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from dledger.errors import DLedgerError
from rocketstore.client.errors import is_retried_read
from rocketstore.client.group_consumer import GroupConsumer
from rocketstore.client.shares import GroupDelivery
from rocketstore.types import BrokerRole
from tests.support.waiting import wait_until
from tests.unit.rocketstore.client.cluster_members import Known, queues_of, two_brokers

ALL = ["a0", "a1", "b0", "b1"]
STEPS = 16
PACE_S = 0.15
HANGS_S = 0.6


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Known]:
    """With short pauses everywhere."""
    for name in ("REFRESH_S", "DOUBTED_REFRESH_S", "UNKNOWN_REFRESH_S"):
        monkeypatch.setattr(f"rocketstore.client.routes.{name}", 0.05)
    for module in ("group_division", "group_branch"):
        monkeypatch.setattr(f"rocketstore.client.{module}.LOOK_S", 0.05)
    monkeypatch.setattr("rocketstore.client.group_branch.REBALANCE_S", 0.5)
    monkeypatch.setattr("rocketstore.broker.locks.LOCK_S", 9.0)  # also those of members that were killed
    monkeypatch.setattr("rocketstore.client.group_branch.LOCK_VALID_S", 3.0)
    monkeypatch.setattr("rocketstore.client.group_branch.RENEW_S", 1.0)
    with two_brokers(tmp_path) as found:
        yield found


class Storm:
    """What happens, and what must be true in spite of it."""

    def __init__(self, known: Known, seed: int, *, ordered: bool) -> None:
        self.known = known
        self.random = random.Random(seed)
        self.ordered = ordered
        self.sent: list[bytes] = []
        self.done: list[bytes] = []
        self.members: list[GroupConsumer] = []
        self.masterless: set[str] = set()
        self.gate = threading.Event()  # handlers hang unless it is set
        self.gate.set()
        self._handled = threading.Event()
        self._running: Counter[str] = Counter()
        self.killed: list[GroupConsumer] = []
        self._lock = threading.Lock()
        self.overlaps: list[str] = []

    def handle(self, member: GroupConsumer, delivery: GroupDelivery) -> None:
        place = str(delivery.share.name)
        with self._lock:
            if self.ordered and self._running[place]:
                self.overlaps.append(place)
            self._running[place] += 1
        self.gate.wait(HANGS_S)
        with self._lock:
            self._running[place] -= 1
            if member not in self.killed:
                self.done.append(delivery.body)
        self._handled.set()

    def owned(self) -> list[str]:
        """Each queue as often as it has an owner."""
        return sorted(one for each in self.members for one in queues_of(each))

    def committed(self) -> int:
        """Messages, of all queues."""
        return sum(sum(self.known.committed(name).values()) for name in "ab")

    def step(self) -> None:
        acts = [self.join, self.join, self.join, self.leave, self.kill, self.lose_master, self.forget, self.hang]
        self.random.choice([*acts, self.heal, self.go_on])()
        self.send()
        self._handled.clear()
        self._handled.wait(PACE_S * self.random.random())

    def send(self) -> None:
        for name in {"a", "b"} - self.masterless:
            bodies = [b"%s%d" % (name.encode(), len(self.sent) + at) for at in range(3)]
            self.known.put(name, *bodies, queue_id=self.random.randrange(2))
            self.sent += bodies

    def join(self, timeout_s: float = 2.0) -> None:
        if len(self.members) < 3:
            member = self.known.unstarted(ordered=self.ordered, timeout_s=timeout_s)
            try:
                member.start(partial(self.handle, member))
            except DLedgerError:  # no broker has a route, or a master
                member.close()
                return
            self.members.append(member)

    def leave(self) -> None:
        if self.members:
            member = self.members.pop(self.random.randrange(len(self.members)))
            try:
                member.close()
            except DLedgerError as error:
                if not is_retried_read(error):  # neither a broker without a master, nor a slow one
                    raise

    def kill(self) -> None:
        """What it has in use is not done, and what it has not committed is not committed."""
        if self.members:
            member = self.members.pop(self.random.randrange(len(self.members)))
            with self._lock:
                self.killed.append(member)
            assert member._division is not None
            for one in member._division.branches():
                one._connection.close()
            with suppress(DLedgerError):
                member.close()

    def lose_master(self) -> None:
        name = self.random.choice("ab")
        self.masterless.add(name)
        self.known.brokers[name].become(BrokerRole.SLAVE)

    def heal(self) -> None:
        for name in self.masterless:
            self.known.brokers[name].become(BrokerRole.SYNC_MASTER)
        self.masterless.clear()
        self.known.register("a", "b")

    def forget(self) -> None:
        self.known.forget(self.random.choice("ab"))

    def hang(self) -> None:
        self.gate.clear()

    def go_on(self) -> None:
        self.gate.set()


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("seed", [6, pytest.param(7, marks=pytest.mark.slow)])
def test_nothing_is_missed_in_a_storm(known: Known, seed: int, ordered: bool) -> None:
    """In the end each queue has one owner, every message was handled, and all is committed at its broker."""
    storm = Storm(known, seed, ordered=ordered)
    try:
        for _ in range(STEPS):
            storm.step()
        storm.heal()
        storm.go_on()
        storm.join(timeout_s=30.0)
        storm.send()
        wait_until(lambda: storm.owned() == ALL, "each queue has one owner", 60)
        wait_until(lambda: set(storm.done) == set(storm.sent), "all was handled", 60)
        wait_until(lambda: storm.committed() == len(storm.sent), "all is committed", 60)
        assert not storm.overlaps
    finally:
        storm.gate.set()
        for member in storm.members:
            member.close()
