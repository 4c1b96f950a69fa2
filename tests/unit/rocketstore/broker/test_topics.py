"""Who made how much of what stays."""

from __future__ import annotations

import pytest

from rocketstore.broker import topics
from rocketstore.broker.topics import CreationQuota
from rocketstore.state.publisher import LimitReachedError


def test_each_client_has_its_own_share() -> None:
    """What one makes twice counts once; what is gone does not count."""
    gone: set[str] = set()
    shares = CreationQuota("queues", "queues_max", 10, lambda name: name not in gone)
    shares.take("alice", "A", 8)
    shares.take("alice", "A", 8)
    with pytest.raises(LimitReachedError, match=r"alice has made 8 queues .* is 10 \(queues_max"):
        shares.take("alice", "B", 3)
    shares.take("bob", "B", 10)
    shares.take("alice", "C", 2)

    gone.add("A")
    shares.take("alice", "D", 8)


def test_clients_are_remembered_as_long_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that made nothing for longest is forgotten."""
    monkeypatch.setattr(topics, "OWNERS_MAX", 2)
    shares = CreationQuota("groups", "groups_max", 1, lambda _name: True)
    for owner in ("a", "b", "a", "c"):
        shares.take(owner, owner, 1)

    with pytest.raises(LimitReachedError):
        shares.take("a", "x", 1)
    shares.take("b", "x", 1)
