"""The outbox keeps the order of effects and gives each of them once."""

from __future__ import annotations

from dledger.core.messages import Outbox, RoleChange, SnapshotFetch, TakeLeadership, Wake, hint
from dledger.errors import LeaderHint
from dledger.types import LogIndex, Role, Term
from tests.support.cluster import N1


def test_a_new_outbox_is_empty() -> None:
    """Nothing gathered means nothing to do."""
    assert not Outbox()


def test_take_gives_everything_once() -> None:
    """What was taken is gone from the outbox, so that no effect happens twice."""
    outbox = Outbox()
    outbox.messages.append((N1, TakeLeadership(Term(1))))
    outbox.completions.append(lambda: None)
    outbox.role_changes.append(RoleChange(Role.LEADER, Term(1), N1))
    outbox.committed = LogIndex(0)
    outbox.wake |= Wake.FLUSH
    outbox.fetch_snapshot = SnapshotFetch(N1, LogIndex(7))

    taken = outbox.take()

    assert taken.messages == [(N1, TakeLeadership(Term(1)))]
    assert len(taken.completions) == 1
    assert taken.role_changes == [RoleChange(Role.LEADER, Term(1), N1)]
    assert (taken.committed, taken.wake) == (0, Wake.FLUSH)
    assert taken.fetch_snapshot == SnapshotFetch(N1, LogIndex(7))
    assert taken
    assert not outbox


def test_each_kind_of_effect_makes_the_outbox_true() -> None:
    """A commit index of 0 is an effect, too."""
    assert Outbox(committed=LogIndex(0))
    assert Outbox(wake=Wake.HANDLER)
    assert Outbox(completions=[lambda: None])
    assert Outbox(fetch_snapshot=SnapshotFetch(N1, LogIndex(0)))
    assert Outbox(role_changes=[RoleChange(Role.FOLLOWER, Term(0), None)])


def test_hint_names_a_known_leader_only() -> None:
    """No leader, no hint."""
    assert hint(None) is None
    assert hint(N1) == LeaderHint(N1)
