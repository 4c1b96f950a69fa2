"""What the hot paths tell is kept, and answers go on to whoever waits for them."""

from __future__ import annotations

from dledger.core.messages import RoleChange, RoleReason
from dledger.errors import DLedgerError, NotLeaderError, WouldLoseQuorumError
from dledger.types import AppendedBatch, ChangeKind, LogIndex, NodeId, Role, Term
from dledger_cli.metrics.recorder import MetricsRecorder

N1 = NodeId("n1")


def test_an_answer_is_timed_and_passed_on() -> None:
    """An acknowledged append has a latency; a refused one is counted by its code, and has none."""
    recorder = MetricsRecorder()
    answers: list[AppendedBatch | DLedgerError] = []
    batch = AppendedBatch(Term(1), LogIndex(0), LogIndex(0), (0,))
    refusal = NotLeaderError("no")

    recorder.timed(answers.append)(batch)
    recorder.timed(answers.append)(refusal)

    assert answers == [batch, refusal]
    assert recorder.append_latency_s.read()[0][-1] == ("+Inf", 1)
    assert recorder.failures() == {"NOT_LEADER": 1}


def test_what_was_appended_is_told_from_what_was_received() -> None:
    """A leader's batches make histograms; a follower's runs only add up."""
    recorder = MetricsRecorder()

    recorder.wrote(3, 300, as_leader=True)
    recorder.wrote(5, 500, as_leader=False)
    recorder.flushed(800, 0.002)
    recorder.push_acknowledged(N1, 3, 300, 0.001)

    assert recorder.append_entries.read()[1] == 3
    assert recorder.append_bytes.read()[1] == 300
    assert (recorder.received_entries, recorder.received_bytes) == (5, 500)
    assert recorder.flush_bytes.read()[1] == 800
    assert recorder.peers[N1].entries.read()[1] == 3
    assert recorder.peers[N1].latency_s.read()[0][-1] == ("+Inf", 1)


def test_role_changes_are_counted_by_role_and_reason() -> None:
    """An alert on elections needs to know what brought them about."""
    recorder = MetricsRecorder()
    for reason in (RoleReason.QUORUM_LOST, RoleReason.QUORUM_LOST, RoleReason.LEADER_HEARD):
        recorder.role_changed(RoleChange(Role.FOLLOWER, Term(1), None, reason))
    recorder.role_changed(RoleChange(Role.LEADER, Term(2), N1))

    assert recorder.role_changes() == {
        ("follower", "quorum_lost"): 2,
        ("follower", "leader_heard"): 1,
        ("leader", "unknown"): 1,
    }


def test_changes_of_members_are_counted_by_kind_and_code() -> None:
    """Refusals, too: somebody tries again and again what cannot be done."""
    recorder = MetricsRecorder()
    for _ in range(2):
        recorder.members_changed(ChangeKind.REMOVE, WouldLoseQuorumError("too few"))
    recorder.members_changed(ChangeKind.ADD, None)

    assert recorder.member_changes() == {("remove", "WOULD_LOSE_QUORUM"): 2, ("add", "SUCCESS"): 1}
