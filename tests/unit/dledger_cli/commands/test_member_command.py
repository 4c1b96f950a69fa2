"""``dledger member`` against a group of fake nodes behind real ports: what it says, and with which exit code."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from click.testing import CliRunner, Result

from dledger.errors import (
    DLedgerError,
    LeaderHint,
    NotReadyToPromoteError,
    QuorumAckTimeoutError,
    UnavailableError,
    WouldLoseQuorumError,
)
from dledger.rpc.ports import PeerStatus
from dledger.types import ChangeKind, Configuration, LogIndex, MemberChange, MemberRole, NodeId, Term
from dledger.values import MIB
from dledger_cli.cli import main
from dledger_cli.commands import member as command
from tests.support.fake_group import FakeGroup, fake_group
from tests.support.fake_node import FakeNode

N4 = NodeId("n4")
LAGGING = PeerStatus(
    N4, LogIndex(9), LogIndex(10), "APPEND", 90, 1, 4, "catching up", 3 * 1024 * MIB, 200 * MIB, "3.0 GiB behind"
)
IN_SYNC = PeerStatus(NodeId("n1"), LogIndex(99), LogIndex(100), "APPEND", 0, 0, 8, "in sync")


@pytest.fixture
def group() -> Iterator[FakeGroup]:
    """Of three nodes; the first leads, and the second is in sync."""
    with fake_group() as made:
        made.nodes[0].peers = (IN_SYNC,)
        yield made


@pytest.fixture
def leader(group: FakeGroup) -> FakeNode:
    """The node that the commands change."""
    return group.nodes[0]


def run(group: FakeGroup, *words: str) -> Result:
    return CliRunner().invoke(main, ["member", *words, "-b", group.addresses[0]], prog_name="dledger")


def on_each_pause(monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], None]) -> None:
    """One step in place of each pause; the command is interrupted when they are over."""
    waiting, sleep, own = iter(steps), time.sleep, threading.current_thread()

    def pause(seconds: float) -> None:
        if threading.current_thread() is not own:  # of a library that other tests use
            sleep(seconds)
            return
        step = next(waiting, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    monkeypatch.setattr(time, "sleep", pause)
    monkeypatch.setattr(command, "LINE_EVERY_S", 0)


def become(leader: FakeNode, *kept: str, **fields: object) -> None:
    """The new member has these fields now, and of the others only ``kept`` are left, if any are named."""
    leader.configuration_index += 1
    leader.members = tuple(
        replace(one, **fields) if one.node_id == N4 else one  # type: ignore[arg-type]  # they are its fields
        for one in leader.members
        if not kept or one.node_id in (*kept, N4)
    )


def test_the_list_shows_role_and_progress_of_every_member(group: FakeGroup, leader: FakeNode) -> None:
    """And below, how many may fail. What the leader does not tell of a member is a question mark."""
    leader._change(MemberChange(ChangeKind.ADD, N4, 5, "10.0.0.4", 20911, replaces="n2"))
    leader.peers = (IN_SYNC, LAGGING)

    result = run(group, "list")

    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split("  ")[0] == "node"
    found = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[1:-1]}
    assert found["n0"] == "leader 0 127.0.0.1:20911 - -1 - - -"
    assert found["n1"] == "voter 0 127.0.0.1:20912 in sync 99 0 - 8 ms"
    assert found["n2"] == "voter 0 127.0.0.1:20913 ? ? ? ? ?"
    assert found["n4"] == (
        "learner 0 10.0.0.4:20911 catching up 9 3.0 GiB 200.0 MiB/s 4 ms replaces n2, ready in ~15 s"
    )
    assert lines[-1] == "configuration 9 (committed), majority 2 of 3 voters; tolerates 1 failure"


def test_members_that_were_never_changed_are_called_configured(group: FakeGroup) -> None:
    """There is no index to name."""
    assert run(group, "list").stdout.splitlines()[-1].startswith("members as configured, majority 2 of 3 voters")


def test_json_of_the_list_rounds_no_number(group: FakeGroup, leader: FakeNode) -> None:
    """Ids of 64 bits are strings, and what is not known is null."""
    leader._change(MemberChange(ChangeKind.ADD, N4, (1 << 62) + 1, "10.0.0.4", 20911))
    become(leader, uid=(1 << 63) + 1, number=3)
    leader.peers = (IN_SYNC, LAGGING)

    found = json.loads(run(group, "list", "--json").stdout)

    assert found["configuration"] == {"index": 10, "term": -1, "committed": True, "change_id": str((1 << 62) + 1)}
    assert (found["leader"], found["majority"], found["tolerates"]) == ("n0", 2, 1)
    n4 = next(one for one in found["members"] if one["id"] == "n4")
    assert (n4["uid"], n4["number"], n4["role"], n4["intent"]) == ("8000000000000001", 3, "learner", "promote")
    assert (n4["state"], n4["lag_bytes"], n4["rate_bytes_per_s"]) == ("catching up", 3 << 30, 200 * MIB)
    assert (n4["ready"], n4["ready_in_s"], n4["not_ready_because"]) == (False, 15, "3.0 GiB behind")
    n2 = next(one for one in found["members"] if one["id"] == "n2")
    assert (n2["uid"], n2["state"], n2["match_index"], n2["ready"]) == (None, None, None, None)


def test_without_a_leader_the_list_shows_what_a_member_knows(group: FakeGroup) -> None:
    """And fails: nobody can say how far the others are."""
    group.kill(0)
    group.nodes[1].leader = group.nodes[2].leader = LeaderHint(NodeId("n0"), "")

    words = ["member", "list", "--timeout", "1", "-b", ",".join(group.addresses)]
    result = CliRunner().invoke(main, words, prog_name="dledger")

    assert result.exit_code == 1
    assert "n1" in result.stdout
    assert "no leader: this is what" in result.stderr


def test_an_addition_ends_when_the_member_votes(
    group: FakeGroup, leader: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First what to write into its conf file, then how far it is, then what that means."""

    def never_seen() -> None:
        leader.peers = (IN_SYNC, replace(LAGGING, health="never seen"))

    def catching_up() -> None:
        leader.peers = (IN_SYNC, LAGGING)

    def votes() -> None:
        become(leader, role=MemberRole.VOTER, promote=False)

    on_each_pause(monkeypatch, never_seen, catching_up, votes)

    result = run(group, "add", "n4=10.0.0.4:20911")

    assert result.exit_code == 0, result.output
    assert "  dLegerSelfId=n4" in result.stdout
    assert "  dLegerPeers=n0-127.0.0.1:20911;n1-127.0.0.1:20912;n2-127.0.0.1:20913;n4-10.0.0.4:20911" in result.stdout
    assert "  dLegerJoin=true" in result.stdout
    assert "registered n4 as a learner (configuration 9)" in result.stdout
    assert "n4: never seen: start it, or see whether its peers reach it" in result.stdout
    assert "n4: catching up, " in result.stdout
    assert "200.0 MiB/s" in result.stdout
    assert "n4 is a voter now" in result.stdout
    assert result.stdout.splitlines()[-2].endswith("majority 3 of 4 voters; tolerates 1 failure")
    assert "4 voters tolerate no more failures than 3" in result.stdout.splitlines()[-1]
    (change,) = leader.changes
    assert (change.promote, change.replaces, change.expected_index) == (True, "", -1)


def test_a_replacement_ends_when_the_other_one_is_gone(
    group: FakeGroup, leader: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the two steps comes first; in JSON each is an event."""

    def left() -> None:
        become(leader, "n0", "n1")

    def votes() -> None:
        become(leader, role=MemberRole.VOTER, promote=False, replaces="")

    on_each_pause(monkeypatch, left, votes)

    result = run(group, "replace", "n2", "n4=10.0.0.4:20911", "--json")

    assert result.exit_code == 0, result.output
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [one["event"] for one in events] == ["registered", "progress", "removed", "progress", "promoted", "done"]
    assert (events[2]["node"], events[4]["node"]) == ("n2", "n4")
    assert [one["id"] for one in events[-1]["members"]] == ["n0", "n1", "n4"]
    assert leader.changes[0].replaces == "n2"


def test_a_replacement_goes_on_while_the_other_one_is_there(
    group: FakeGroup, leader: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the new member votes first, and until the last step is committed."""

    def votes() -> None:
        become(leader, role=MemberRole.VOTER, promote=False)

    def leaves() -> None:
        leader.configuration_committed = False
        become(leader, "n0", "n1", replaces="")

    def committed() -> None:
        leader.configuration_committed = True

    left = [votes, leaves, committed]
    on_each_pause(monkeypatch, *(lambda: left.pop(0)() for _ in tuple(left)))

    result = run(group, "replace", "n2", "n4=10.0.0.4:20911")

    assert (result.exit_code, left) == (0, [])
    assert result.stdout.index("n4 is a voter now") < result.stdout.index("n2 was removed")


def test_a_member_that_is_missing_for_the_moment_was_not_cancelled(
    group: FakeGroup, leader: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who leads next may not have committed what it has."""
    before: list[object] = []

    def another_leader() -> None:
        before.append(leader.members)
        leader.configuration_committed = False
        leader.members = tuple(one for one in leader.members if one.node_id != N4)

    def votes() -> None:
        leader.members = before.pop()  # type: ignore[assignment]  # they are its members
        leader.configuration_committed = True
        become(leader, role=MemberRole.VOTER, promote=False)

    on_each_pause(monkeypatch, another_leader, votes)

    result = run(group, "add", "n4=10.0.0.4:20911")

    assert result.exit_code == 0, result.output


def test_the_settings_of_a_new_node_name_its_group(group: FakeGroup, leader: FakeNode) -> None:
    """Unless it is the one that a node has without that setting."""
    assert "dLegerGroup" not in run(group, "add", "n3=10.0.0.3:20911", "--no-wait").stdout
    for node in group.nodes:
        node.group = "orders"

    result = run(group, "add", "n4=10.0.0.4:20911", "--no-wait")

    assert result.exit_code == 0, result.output
    assert "  dLegerGroup=orders\n" in result.stdout


@pytest.mark.parametrize("words", [["--learner"], ["--no-wait"]])
def test_who_need_not_wait_does_not(words: list[str], group: FakeGroup, leader: FakeNode) -> None:
    """A learner that stays one is never promoted."""
    result = run(group, "add", "n4=10.0.0.4:20911", *words)

    assert (result.exit_code, len(leader.changes)) == (0, 1)
    assert leader.changes[0].promote == (words != ["--learner"])


def test_ctrl_c_says_that_the_change_goes_on(
    group: FakeGroup, leader: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And how to undo it."""
    on_each_pause(monkeypatch)

    result = run(group, "add", "n4=10.0.0.4:20911")

    assert result.exit_code == 130
    assert "The change goes on" in result.stderr
    assert "`dledger member cancel n4` undoes it" in result.stderr
    assert len(leader.changes) == 1


def test_an_addition_that_somebody_cancels_fails(
    group: FakeGroup, leader: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for ever."""
    on_each_pause(monkeypatch, lambda: leader._change(MemberChange(ChangeKind.REMOVE, N4, 6)))

    result = run(group, "add", "n4=10.0.0.4:20911")

    assert (result.exit_code, "cancelled" in result.stderr) == (1, True)


def test_a_group_without_a_leader_is_waited_for(
    group: FakeGroup, leader: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever leads next carries the change on."""
    asked = DLedgerError("no leader at present")
    statuses = iter([None, asked, None])
    real = command._wait

    def wait(client: object, *arguments: object) -> object:
        ask = client.leader_status  # type: ignore[attr-defined]  # it is a client

        def sometimes() -> object:
            if isinstance(error := next(statuses, None), DLedgerError):
                raise error
            return ask()

        monkeypatch.setattr(client, "leader_status", sometimes)
        return real(client, *arguments)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(command, "_wait", wait)
    on_each_pause(monkeypatch, lambda: None, lambda: become(leader, role=MemberRole.VOTER, promote=False))

    result = run(group, "add", "n4=10.0.0.4:20911")

    assert result.exit_code == 0, result.output
    assert "no leader at present" in result.stderr


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        (["promote", "n2"], ChangeKind.PROMOTE, "n2 is a voter now"),
        (["demote", "n2"], ChangeKind.DEMOTE, "n2 is a learner now"),
        (["remove", "n2"], ChangeKind.REMOVE, "n2 was removed"),
        (["update", "n2=10.0.0.9:20911"], ChangeKind.UPDATE, "n2 is at 10.0.0.9:20911 now"),
    ],
)
def test_single_steps_say_what_is_left(
    words: list[str], kind: ChangeKind, said: str, group: FakeGroup, leader: FakeNode
) -> None:
    """Each is decided on the members as they are: if they change meanwhile, it is refused."""
    result = run(group, *words)

    assert (result.exit_code, said in result.stdout, "majority " in result.stdout) == (0, True, True)
    (change,) = leader.changes
    assert (change.kind, change.node_id, change.expected_index) == (kind, "n2", -1)
    assert json.loads(run(group, *words, "--json").stdout)["event"] == "done"


def test_cancel_removes_learners_only(group: FakeGroup, leader: FakeNode) -> None:
    """Who mistypes the name of a voter keeps it."""
    for words in (["cancel", "n2"], ["cancel", "n2", "--json"]):
        refused = run(group, *words)
        assert (refused.exit_code, leader.changes) == (1, [])
        assert "n2 is a voter" in refused.stderr
    leader._change(MemberChange(ChangeKind.ADD, N4, 5, "h", 1))

    assert run(group, "cancel", "n4").exit_code == 0
    assert leader.changes[0].kind is ChangeKind.REMOVE


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (WouldLoseQuorumError("2 voters would be left, of which only n1 is reachable"), 1),
        (NotReadyToPromoteError("n2 is 3 GiB behind"), 1),
        (QuorumAckTimeoutError("not committed in time"), 3),
    ],
)
def test_the_exit_code_tells_refused_from_unknown(
    error: DLedgerError, code: int, group: FakeGroup, leader: FakeNode
) -> None:
    """1: nothing was done; 3: look at the list."""
    leader.change_error = error

    result = run(group, "remove", "n2")

    assert (result.exit_code, str(error) in result.stderr) == (code, True)


@pytest.mark.parametrize(
    "words", [["add", "n4"], ["add", "n4=h"], ["add", "=h:1"], ["update", "n4=h:0"], ["replace", "n3"]]
)
def test_wrong_usage_is_told_before_anything_is_asked(words: list[str], group: FakeGroup, leader: FakeNode) -> None:
    """With exit code 2."""
    assert (run(group, *words).exit_code, leader.changes) == (2, [])


class _Losing:
    """A client whose first answers are lost."""

    def __init__(self, *outcomes: DLedgerError | Configuration) -> None:
        self._outcomes = list(outcomes)
        self.asked: list[MemberChange] = []

    def change_members(self, change: MemberChange) -> Configuration:
        self.asked.append(change)
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, DLedgerError):
            raise outcome
        return outcome


CHANGE = MemberChange(ChangeKind.REMOVE, NodeId("n2"), 7)
LOST = QuorumAckTimeoutError("no answer")


def test_a_lost_answer_is_asked_for_again_with_the_same_id() -> None:
    """So the change is made once."""
    made = Configuration((), LogIndex(3), Term(1))
    client = _Losing(LOST, LOST, made)

    assert command.make(client, CHANGE) is made  # type: ignore[arg-type]  # it has what is needed
    assert client.asked == [CHANGE] * 3


@pytest.mark.parametrize("then", [LOST, UnavailableError("no leader"), WouldLoseQuorumError("no")])
def test_after_a_lost_answer_a_refusal_proves_nothing(then: DLedgerError) -> None:
    """The first attempt may have changed the members, and that may be why."""
    with pytest.raises(QuorumAckTimeoutError) as raised:
        command.make(_Losing(LOST, then, then), CHANGE)  # type: ignore[arg-type]  # it has what is needed
    assert raised.value.outcome == "unknown"
