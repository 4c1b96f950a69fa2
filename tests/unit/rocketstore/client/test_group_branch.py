"""What a member does at one group of brokers when its locks end, its plan changes, or the master is gone."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator

import pytest

from dledger.errors import UnavailableError
from rocketstore.client.group_branch import Assignment, Branch
from rocketstore.client.group_division import Division
from rocketstore.client.group_offsets import Beginnings, Fetched
from rocketstore.client.shares import QueueName
from rocketstore.state.changes import TopicConfig
from rocketstore.types import BrokerRole
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness
from tests.unit.rocketstore.client.test_group_consumer import Seen, committed, member, put


@pytest.fixture
def broker() -> Iterator[RemotingHarness]:
    with RemotingHarness() as harness:
        harness.state.table["%RETRY%g"] = TopicConfig("%RETRY%g", 1, 1)
        yield harness


def lockable(broker: RemotingHarness) -> list[int]:
    """The queues that another client may lock; it does."""
    queues = tuple(("T", queue_id) for queue_id in range(4))

    async def lock() -> list[int]:
        return [queue_id for _, queue_id in broker.groups._locks.lock("g", "java", queues)]

    return broker.bridge.run(lock())


def test_nothing_is_handed_out_once_a_lock_has_ended(broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the member was doing meanwhile; renewed, it goes on."""
    monkeypatch.setattr("rocketstore.client.group_branch.LOCK_VALID_S", 0.3)
    monkeypatch.setattr("rocketstore.client.group_branch.RENEW_S", 0.05)
    monkeypatch.setattr("rocketstore.client.group_branch.LOOK_S", 0.05)
    put(broker, 5)
    with member(broker, ordered=True) as one:
        share = one._shares.queues[next(name for name in one.queues if name.topic == "T")]
        first = [each for each in (one.receive(15.0) for _ in range(4)) if each is not None]
        broker.become(BrokerRole.SLAVE)
        wait_until(lambda: not share.usable, "the lock has ended")
        for each in first:
            one.ack(each)
        assert one.receive(0.1) is None
        broker.become(BrokerRole.SYNC_MASTER)
        last = one.receive(15.0)
        assert last is not None
        assert last.body == b"4"


def test_a_queue_that_is_not_taken_after_all_is_not_locked(
    broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its offset could not be had. Another member need not wait until the lock ends."""

    def unavailable(*_: object) -> None:
        raise UnavailableError("scripted")

    monkeypatch.setattr(Beginnings, "of", unavailable)
    with pytest.raises(UnavailableError):
        member(broker, ordered=True, timeout_s=3.0)
    assert lockable(broker) == [0, 1, 2, 3]


def test_a_plan_that_has_changed_meanwhile_is_not_carried_out(
    broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The beginnings took long to find: another member may have these queues by now."""
    added: list[bool] = []
    find, add, changed = Beginnings.of, Branch._add, threading.Event()
    branches: list[Branch] = []
    apply = Branch._apply

    def noted(self: Branch) -> None:
        branches.append(self)
        apply(self)

    def slowly(self: Beginnings, names: Collection[QueueName]) -> Fetched:
        found = find(self, names)
        if not changed.is_set():
            changed.set()
            branches[0].assign(Assignment(frozenset(), alone=True))
        return found

    def checked(self: Branch, name: QueueName, offset: int, incarnation: int, usable_until: float) -> None:
        added.append(name in self.planned)
        add(self, name, offset, incarnation, usable_until)

    monkeypatch.setattr(Branch, "_apply", noted)
    monkeypatch.setattr(Beginnings, "of", slowly)
    monkeypatch.setattr(Branch, "_add", checked)
    with member(broker, ordered=True) as one:
        wait_until(lambda: len(one.queues) == 5, "it has its queues, after another division")
    assert changed.is_set()
    assert all(added)


@pytest.mark.parametrize("where", ["_adopt_and_commit", "_look_after", "_renew"])
def test_a_defect_does_not_end_a_members_thread(
    broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """Its locks, commits and shares would end without a word. It is logged with its traceback."""
    works, failed = getattr(Branch, where), threading.Event()

    def fails_once(self: Branch) -> None:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("a defect")
        works(self)

    monkeypatch.setattr("rocketstore.client.group_branch.RENEW_S", 0.05)
    monkeypatch.setattr("rocketstore.client.group_branch.LOOK_S", 0.05)
    monkeypatch.setattr(Branch, where, fails_once)
    bodies = put(broker, 8)
    seen = Seen()
    with member(broker, seen, ordered=True):
        wait_until(failed.is_set, "it has failed")
        wait_until(lambda: sorted(seen.bodies) == bodies, "all are handled")
        wait_until(lambda: sum(committed(broker).values()) == 8, "all is committed")
    assert any(one.exc_info and "a defect" in one.message for one in caplog.records)


def test_a_defect_in_dividing_the_queues_does_not_end_it(
    broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    divide, failed = Division._divide, threading.Event()

    def fails_once(self: Division) -> None:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("a defect")
        divide(self)

    monkeypatch.setattr(Division, "_divide", fails_once)
    with member(broker) as one:
        assert len(one.queues) == 5
    assert failed.is_set()


def test_a_defect_while_leaving_is_told(broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise closing would look as if everything had been committed."""
    one = member(broker)

    def fails(self: Branch, shares: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(Branch, "_commit", fails)
    with pytest.raises(UnavailableError, match="a defect"):
        one.close()
