"""Locks on queues: one client of a group has one, and nobody has too many."""

from __future__ import annotations

import pytest

from rocketstore.broker import groups as module
from rocketstore.broker.groups import LOCK_S, QueueLocks
from rocketstore.broker.refusal import Refusal


class _Locks(QueueLocks):
    """With a clock that moves when told to."""

    def __init__(self, share_percent: int = 100) -> None:
        self.now = 1000.0
        super().__init__(lambda: self.now, share_percent)

    def take(self, client_id: str, *numbers: int, group: str = "g", owner: str = "") -> list[int]:
        """The numbers of the queues that the client has now."""
        queues = [("T", number) for number in numbers]
        return [queue_id for _, queue_id in self.lock(group, client_id, queues, owner)]

    def give(self, client_id: str, *numbers: int) -> None:
        self.unlock("g", client_id, [("T", number) for number in numbers])


def test_one_client_of_a_group_has_a_queue_until_it_gives_it_back_or_is_silent() -> None:
    locks = _Locks()
    assert locks.take("a", 0, 1) == [0, 1]
    assert locks.take("b", 0, 1, 2) == [2]
    assert locks.take("b", 0, group="other") == [0]
    locks.give("b", 0)
    assert locks.take("b", 0) == []
    locks.give("a", 0)
    assert locks.take("b", 0) == [0]
    locks.now += LOCK_S
    assert locks.take("b", 1) == []
    assert locks.take("a", 1) == [1]
    locks.now += LOCK_S
    assert locks.take("b", 1) == []
    locks.now += 1
    assert locks.take("b", 1) == [1]


def test_nobody_takes_the_locks_of_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever client ids, groups and queues somebody invents; and what has expired counts no more."""
    monkeypatch.setattr(module, "LOCKS_MAX", 8)
    locks = _Locks(50)
    for number in range(4):
        assert locks.take(f"bad{number}", number, group=f"bad{number}", owner="bad") == [number]
    with pytest.raises(Refusal, match="account or address"):
        locks.take("bad", 9, owner="bad")
    assert locks.take("good", 0, 1, 2, owner="good") == [0, 1, 2]
    for _ in range(9):
        assert locks.take("good", 0, owner="good") == [0]
        assert locks.take("bad3", 3, group="bad3", owner="bad") == [3]
    locks.take("else", 0, group="else", owner="else")
    with pytest.raises(Refusal, match="the most there may be"):
        locks.take("more", 0, group="more", owner="more")
    locks.now += LOCK_S + 1
    assert locks.take("bad", 0, 1, 2, 3, owner="bad") == [0, 1, 2, 3]
    with pytest.raises(Refusal, match="account or address"):
        locks.take("bad", 9, owner="bad")
    locks.give("bad", 0, 1, 2, 3)
    assert locks._owned == {}
    assert locks._locks == {}


def test_a_request_costs_the_same_however_many_locks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a million of them were looked through for each new one once there were too many."""
    monkeypatch.setattr(module, "LOCKS_MAX", 5000)
    locks = _Locks(80)
    for owner, number in (("bad", 4000), ("good", 1000)):
        for one in range(number):
            assert locks.take(owner, one, group=owner, owner=owner) == [one]
    locks.now += LOCK_S + 1
    looked: list[str] = []
    drop = locks._drop

    def noted(key: tuple[str, str, int]) -> None:
        looked.append(key[0])
        drop(key)

    monkeypatch.setattr(locks, "_drop", noted)
    assert locks.take("good", 5000, group="good", owner="good") == [5000]
    assert sorted(looked) == ["bad", "bad", "good", "good"]
    for one in range(1500):
        assert locks.take("new", one, group="new", owner="new") == [one]
    assert len(locks._locks) < 5000, "more go than come"
