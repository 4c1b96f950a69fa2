"""Followers and leaders whose logs begin at different entries, because retention removed older ones."""

from __future__ import annotations

from dledger.core.messages import PushCompare, PushInstall, PushKind
from dledger.errors import ResponseCode
from dledger.types import EntryId, LogIndex, Position, Term
from tests.support.cluster import N0, N1, N2, Cluster, made_log
from tests.support.solo import Solo, Source


def test_a_follower_behind_the_leaders_retention_is_restarted_from_its_begin() -> None:
    """F14: an empty follower joins a leader that no longer has its first entries."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.append(N0, b"a", b"b", b"c")
    cluster.advance(20)
    cluster.wipe(N2)
    cluster[N0].log.expire(LogIndex(2))

    cluster.start(N2)
    cluster.advance(2000)

    assert cluster[N2].log.begin.index == 2
    assert cluster.same_logs()
    assert cluster[N2].saved.voter


def test_a_lagging_follower_behind_the_leaders_retention_catches_up() -> None:
    """F14 for a follower that holds some of what has expired."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.crash(N2)
    cluster.append(N0, b"a", b"b", b"c")
    cluster.advance(20)
    cluster[N0].log.expire(LogIndex(2))

    cluster.start(N2)
    cluster.advance(2000)

    assert cluster[N2].log.begin.index == 2
    assert cluster.same_logs()


def test_an_installed_follower_can_be_installed_again() -> None:
    """A second INSTALL works like the first (DLedger's snapshot slot worked once per process life)."""
    cluster = Cluster(3)
    cluster.elect()
    for body, begin in ((b"a", 1), (b"b", 2)):
        cluster.isolate(N2)
        cluster.append(N0, body, body, body)
        cluster.advance(20)
        cluster[N0].log.expire(LogIndex(2 * begin))
        cluster.heal()
        cluster.advance(3000)

        assert cluster[N2].log.begin.index == 2 * begin
        assert cluster.same_logs()


def test_a_follower_that_expired_more_than_its_leader_is_compared_at_its_begin() -> None:
    """The follower's begin is committed, so the leader holds it: the next COMPARE is made there."""
    logs = {
        N0: made_log(1, 1, 1, 1, committed=3),
        N1: made_log(1, 1, 1, 1, committed=3),
        N2: made_log(1, 1, 1, committed=2, begin=1),
    }
    cluster = Cluster(3, logs=logs)

    cluster.elect()
    cluster.advance(1000)

    assert cluster.same_logs()


def test_compare_below_the_followers_begin_names_the_begin() -> None:
    """The refusal tells the leader where to compare next."""
    solo = Solo(terms=(1, 1, 1, 1), committed=3)
    solo.log.expire(LogIndex(2))
    source = Source(2, 1, 1, 1, 1)

    (answer,) = solo.push(N1, source.compare(1))

    assert answer.code is ResponseCode.INDEX_LESS_THAN_LOCAL_BEGIN
    assert answer.conflict == EntryId(Term(1), LogIndex(2))


def test_install_resets_a_log_that_conflicts_at_the_leaders_begin() -> None:
    """Entries that the leader's begin contradicts go, and what follows it is taken."""
    solo = Solo(terms=(1, 2, 2))
    source = Source(4, 1, 3, 3, 4)
    source.log.expire(LogIndex(2))

    (answer,) = solo.push(N1, _install(source))

    assert answer.kind is PushKind.INSTALL
    assert answer.code is ResponseCode.SUCCESS
    assert answer.verified_index == 2
    assert solo.log.last == EntryId(Term(3), LogIndex(2))
    assert solo.state.commit_index == 2


def test_install_keeps_a_log_that_holds_the_leaders_begin() -> None:
    """A follower that already has the leader's begin loses nothing to a late or repeated INSTALL."""
    solo = Solo(terms=(1, 1, 1))
    source = Source(2, 1, 1, 2)
    source.log.expire(LogIndex(0))

    (answer,) = solo.push(N1, _install(source))

    assert answer.code is ResponseCode.SUCCESS
    assert solo.log.last.index == 2
    assert solo.log.begin.index == -1


def _install(source: Source) -> PushInstall:
    begin = source.log.begin
    before = EntryId(begin.term, begin.index)
    return PushInstall(source.term, 1, before, begin.chain_crc, Position(begin.position))


def test_the_run_that_lies_below_the_followers_begin_is_acknowledged() -> None:
    """Whatever has expired on the follower was committed, hence is the leader's."""
    solo = Solo(terms=(1, 1, 1, 1), committed=3)
    solo.log.expire(LogIndex(2))
    source = Source(2, 1, 1, 1, 1)

    (answer,) = solo.push(N1, source.append(0, 1))

    assert answer.code is ResponseCode.SUCCESS
    assert answer.verified_index == 3


def test_a_leader_whose_begin_passes_the_next_entry_installs() -> None:
    """Retention that overtakes a slow follower makes the dispatcher start over with INSTALL."""
    solo = Solo(terms=(1, 1, 1), committed=2)
    solo.lead()
    solo.streaming(N1, match=0)
    solo.log.expire(LogIndex(2))

    (message,) = solo.dispatch(N1)

    assert isinstance(message, PushInstall)
    assert message.before_begin.index == 2


def test_install_below_the_followers_own_begin_changes_nothing() -> None:
    """Two logs may have expired to different points; what the follower lacks at the leader's begin was committed."""
    solo = Solo(terms=(1, 1, 1, 1), committed=3)
    solo.log.expire(LogIndex(2))
    source = Source(2, 1, 1, 1, 1)
    source.log.expire(LogIndex(0))

    (answer,) = solo.push(N1, _install(source))

    assert answer.code is ResponseCode.SUCCESS
    assert answer.verified_index == 3
    assert solo.log.last.index == 3


def test_a_refusal_without_watermarks_does_not_send_the_dispatcher_to_the_start() -> None:
    """A full queue says nothing about the follower's log: go on after what is known to be durable there."""
    solo = Solo(terms=(1, 1, 1))
    solo.lead()
    solo.streaming(N1)
    solo.log.append_as_leader(solo.state.term, [b"x"])
    solo.dispatch(N1)

    solo.respond(N1, PushKind.APPEND, ResponseCode.PUSH_REQUEST_IS_FULL)
    (message,) = solo.dispatch(N1, ms=100)

    assert isinstance(message, PushCompare)
    assert message.previous.index == 3
