"""When a learner may become a voter, and what is told of members."""

from __future__ import annotations

import pytest

from dledger.core.messages import HeartbeatResponse
from dledger.types import LogIndex, MemberProgress, Standing
from tests.support.cluster import N1, N2, N3
from tests.support.members import configuration, put
from tests.support.solo import Solo

_TIMEOUT_MS = 500
"""The shortest election timeout of these settings."""


def _leader() -> Solo:
    """n0 leads n1 and n2; n3 is a learner whose process 7 has been heard with standing."""
    solo = Solo(3, terms=[1], committed=0)
    solo.lead()
    term = int(solo.state.term)
    solo.state.adopt(configuration("012", "3", index=put(solo.log, term, "012", "3"), term=term))
    solo.tick()
    _hear(solo)
    return solo


def _hear(solo: Solo, **more: object) -> None:
    """Everybody answers heartbeats; n3 with ``more``."""
    for peer in (N1, N2):
        solo.beat(peer, boot_id=7)
    answer = HeartbeatResponse(solo.state.term, boot_id=7, uid=9, **more)  # type: ignore[arg-type]  # by name
    solo.node.receive(N3, answer, solo.now_ms)
    solo.leader_role.boot_ids[N3] = 7


def _pass(solo: Solo, ms: int) -> None:
    """Time passes, in which all are heard."""
    for _ in range(ms // 50):
        solo.tick(50)
        _hear(solo)
        solo.take()


def _told(solo: Solo) -> MemberProgress:
    (told,) = (one for one in solo.node.changes.progress(solo.now_ms) if one.node_id == N3)
    return told


def test_a_learner_is_ready_that_holds_what_was_committed_a_timeout_ago() -> None:
    """M4: what came since is on its way."""
    solo = _leader()
    held = solo.log.last.index
    solo.state.advance_commit(held)
    _pass(solo, _TIMEOUT_MS)
    solo.matches(N3, held)
    for _ in range(8):
        solo.log.append_as_leader(solo.state.term, [b"x"])
        solo.state.advance_commit(solo.log.last.index)
        _pass(solo, 50)
    assert _told(solo).not_ready == ""
    assert _told(solo).state == "in sync"

    _pass(solo, 300)

    assert _told(solo).not_ready.startswith("it lacks 8 entries (")
    assert _told(solo).state == "catching up"


def test_a_learner_needs_nothing_that_is_not_committed() -> None:
    """M4: it does not get it (M9), however long the commit takes."""
    solo = _leader()
    solo.state.advance_commit(solo.log.last.index)
    solo.matches(N3, solo.log.last.index)
    solo.log.append_as_leader(solo.state.term, [b"x"])

    _pass(solo, 2 * _TIMEOUT_MS)

    assert _told(solo).not_ready == ""


def test_a_new_leader_does_not_know_yet() -> None:
    """M4: it has seen no learner for a whole timeout."""
    solo = _leader()
    solo.matches(N3, solo.log.last.index)
    solo.tick()

    assert "has not looked for 500 ms" in _told(solo).not_ready


def test_what_an_earlier_leadership_saw_promotes_nobody() -> None:
    """M4: the log has grown since."""
    solo = _leader()
    _pass(solo, 2 * _TIMEOUT_MS)
    solo.hear(N1, solo.state.term + 1)
    solo.lead()
    solo.tick()
    _hear(solo)
    solo.matches(N3, solo.log.last.index)

    assert _told(solo).not_ready.startswith("the leader has not looked for")


def test_a_learner_that_is_silent_is_not_ready() -> None:
    """M4: within the last timeout."""
    solo = _leader()
    _pass(solo, 2 * _TIMEOUT_MS)
    solo.matches(N3, solo.log.last.index)
    solo.tick(_TIMEOUT_MS + 1)

    assert _told(solo).not_ready == "it was last heard 501 ms ago"


@pytest.mark.parametrize("standing", [Standing.BLANK, Standing.DOUBTFUL])
def test_a_learner_without_standing_is_not_ready(standing: Standing) -> None:
    """M4: its acknowledgements would count from its promotion on."""
    solo = _leader()
    _pass(solo, _TIMEOUT_MS)
    solo.matches(N3, solo.log.last.index)
    solo.leader_role.counts[N3] = False
    _hear(solo, standing=standing)

    assert _told(solo).not_ready.startswith("it has no standing yet")
    assert _told(solo).state == "no standing"


def test_a_new_process_without_memory_is_not_ready_for_what_the_old_one_held() -> None:
    """M4, M11: its heartbeat is heard before it has answered a push."""
    solo = _leader()
    _pass(solo, _TIMEOUT_MS)
    solo.matches(N3, solo.log.last.index)
    assert _told(solo).not_ready == ""
    answer = HeartbeatResponse(solo.state.term, boot_id=8, uid=10, standing=Standing.BLANK)
    solo.node.receive(N3, answer, solo.now_ms)

    assert _told(solo).not_ready.startswith("it has no standing yet")
    assert _told(solo).state == "no standing"


def test_a_learner_whose_disk_is_full_is_not_ready() -> None:
    """Another voter without room helps nobody."""
    solo = _leader()
    _pass(solo, _TIMEOUT_MS)
    solo.matches(N3, solo.log.last.index)
    _hear(solo, disk_full=True)

    assert _told(solo).not_ready == "its disk is full"
    assert _told(solo).state == "disk full"


def test_a_learner_is_not_ready_before_its_uid_is_known() -> None:
    """M11: the promotion records whose memory becomes a voter."""
    solo = _leader()
    _pass(solo, _TIMEOUT_MS)
    solo.matches(N3, solo.log.last.index)
    solo.leader_role.boot_ids[N3] = 8

    assert _told(solo).not_ready == "it has not been heard since it took standing"


def test_a_member_that_was_never_heard_is_said_to_be_so() -> None:
    """It may not have been started."""
    solo = Solo(3, terms=[1], committed=0)
    solo.lead()
    solo.state.adopt(configuration("012", "3", index=put(solo.log, int(solo.state.term), "012", "3")))
    solo.tick()

    assert (_told(solo).state, _told(solo).last_contact_ms) == ("never seen", -1)
    assert _told(solo).not_ready == "it was never heard"


def test_rate_and_lag_are_in_bytes_of_the_log() -> None:
    """What is left to send, and how fast it is sent."""
    solo = _leader()
    for _ in range(100):
        solo.log.append_as_leader(solo.state.term, [bytes(952)])
    first = solo.log.last.index - 100
    solo.matches(N3, first)
    _pass(solo, 1000)
    assert (_told(solo).lag_entries, _told(solo).lag_bytes) == (100, 100_000)
    solo.matches(N3, first + 40)
    _pass(solo, 1000)

    assert (_told(solo).lag_entries, _told(solo).lag_bytes, _told(solo).rate) == (60, 60_000, 40_000)
    solo.matches(N3, LogIndex(first + 100))
    assert (_told(solo).lag_entries, _told(solo).lag_bytes, _told(solo).rate) == (0, 0, 0)


def test_followers_know_nothing_of_others() -> None:
    """Only a leader does."""
    assert Solo(3).node.changes.progress(0) == ()
