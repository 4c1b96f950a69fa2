"""``dledger cluster rebalance``: one transfer at a time, another way round a member that refuses, and an end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from unittest.mock import Mock

import pytest

from dledger.errors import DLedgerError, LeaderHint, RequestTimeoutError
from dledger.rpc.ports import MemberStatus, NodeStatus
from dledger.types import NodeId
from dledger_cli.commands import rebalance
from dledger_cli.commands.rebalance import GroupPlacement, LeaderPlacement, Move, _Run, _Step, _why_unable
from rocketstore.client.aio.routes import RoutedBroker
from tests.support.fake_node import FakeNode

N0, N1, N2 = NodeId("n0"), NodeId("n1"), NodeId("n2")
HOSTS = {N0: "10.0.0.1:1", N1: "10.0.0.2:1", N2: "10.0.0.3:1"}


class Groups:
    """Groups all led by n0, whose leaders move as told; members of ``refusing`` refuse, ``restless`` ones go back."""

    def __init__(
        self, names: str, refusing: Mapping[str, NodeId] | None = None, restless: str = "", leaderless: str = ""
    ) -> None:
        self.found = {name: GroupPlacement(name, None if name in leaderless else N0, HOSTS) for name in names}
        self.problems = {name: f"{name} has no leader: start its members" for name in leaderless}
        self.refusing = refusing or {}
        self.restless = restless
        self.transfers: list[Move] = []

    def placement(self) -> LeaderPlacement:
        """As it is."""
        return LeaderPlacement(list(self.found.values()))

    def look(self, name: str) -> None:
        """Groups of ``restless`` go back by themselves."""
        if name in self.restless:
            self.found[name] = replace(self.found[name], leader=N0)

    def transfer(self, move: Move, _wait_s: float) -> _Step:
        """One transfer."""
        self.transfers.append(move)
        one = self.found[move.group]
        if self.refusing.get(move.group) == move.target:
            why = f"{move.target} is 9 entries behind: wait until it has caught up"
            self.found[move.group] = replace(one, unable={**one.unable, move.target: why})
            return _Step(move, error=why)
        self.found[move.group] = replace(one, leader=move.target)
        return _Step(move, 0.25)


class Member:
    """What a group's members answer, in the place of a client; each transfer is refused."""

    def __init__(self) -> None:
        members = tuple(MemberStatus(node, address, address) for node, address in HOSTS.items())
        self.answers: dict[NodeId, NodeStatus | DLedgerError] = {
            node: FakeNode("a", node, leader=None if node == N0 else LeaderHint(N0), members=members).status()
            for node in HOSTS
        }
        self.fails = False

    def members_status(self) -> Mapping[NodeId, NodeStatus | DLedgerError]:
        if self.fails:
            raise RequestTimeoutError("no answer")
        return self.answers

    def transfer_leadership(self, target: NodeId) -> None:
        raise RequestTimeoutError(f"{target} is behind")

    def close(self) -> None:
        pass


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> Member:
    """Of the one group of ``real_groups``."""
    made = Member()
    monkeypatch.setattr(rebalance._Groups, "_client", lambda *_: made)
    return made


@pytest.fixture
def real_groups(member: Member) -> rebalance._Groups:
    """Group a, which n0 leads."""
    admin = Mock(statuses=Mock(return_value={}))
    return rebalance._Groups(admin, [RoutedBroker("c", "a", {0: HOSTS[N0]})], Mock())


def run(groups: Groups) -> _Run:
    """A run of the command with these."""
    return _Run(groups, 30.0, quiet=False)  # type: ignore[arg-type]  # as far as it is used


def test_leaders_move_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    """Each is told as soon as its new leader accepts messages."""
    groups = Groups("abc")
    one = run(groups)

    placement = one.carry_out()

    assert placement.led() == {"10.0.0.1": ["c"], "10.0.0.2": ["a"], "10.0.0.3": ["b"]}
    assert one.problems(placement) == []
    assert capsys.readouterr().out.splitlines() == [
        "a: n0 (10.0.0.1) -> n1 (10.0.0.2), accepts messages after 0.25 s",
        "b: n0 (10.0.0.1) -> n2 (10.0.0.3), accepts messages after 0.25 s",
    ]


def test_a_dry_run_transfers_nothing() -> None:
    """It tells what would be."""
    groups = Groups("abc")
    one = run(groups)

    planned = one.plan()

    assert (groups.transfers, len(one.steps)) == ([], 2)
    assert [len(names) for names in planned.led().values()] == [1, 1, 1]


def test_another_group_moves_if_a_member_lags() -> None:
    """The refusal is shown, and the machine gets its share all the same."""
    groups = Groups("abc", refusing={"a": N1})
    one = run(groups)

    placement = one.carry_out()

    assert [len(names) for names in placement.led().values()] == [1, 1, 1]
    assert one.problems(placement) == []
    assert one.steps[0].error


def test_a_member_that_lags_is_named_if_its_machine_has_no_share() -> None:
    """With what to do."""
    groups = Groups("a", refusing={"a": N1})
    groups.found["b"] = GroupPlacement("b", N0, {N0: HOSTS[N0], N1: HOSTS[N1]}, {N1: "its disk is full: make room"})
    groups.found["a"] = GroupPlacement("a", N0, {N0: HOSTS[N0], N1: HOSTS[N1]})
    one = run(groups)

    told = one.problems(one.carry_out())

    assert told == [
        "a did not move to n1: n1 is 9 entries behind: wait until it has caught up",
        "b: n1 (10.0.0.2) cannot lead: its disk is full: make room",
    ]


def test_a_group_without_a_leader_is_named_and_the_others_are_spread() -> None:
    """It is no balance as long as one is missing."""
    groups = Groups("abc", leaderless="a")
    one = run(groups)

    placement = one.carry_out()

    assert sorted(len(names) for names in placement.led().values()) == [0, 1, 1]
    assert one.problems(placement) == ["a has no leader: start its members"]


def test_leaders_that_go_back_by_themselves_end_it() -> None:
    """After a bounded number of transfers, with the likely reasons."""
    groups = Groups("abc", restless="abc")
    one = run(groups)

    (told,) = one.problems(one.carry_out())

    assert len(groups.transfers) == 3 * rebalance._ATTEMPTS_PER_GROUP
    assert told.startswith("leaders were moved 9 times: look at what moves them back (preferredLeaderIds, elections)")


def test_a_group_that_answers_again_is_no_problem_any_more(member: Member, real_groups: rebalance._Groups) -> None:
    """Members are asked after each transfer, when some may be busy; the last answer counts."""
    member.fails = True
    real_groups.look("a")
    assert "no member answers" in real_groups.problems["a"]

    member.fails = False
    real_groups.look("a")

    assert real_groups.problems == {}
    assert real_groups.placement().groups["a"].leader == N0


def test_a_member_that_did_not_take_over_is_not_asked_again(real_groups: rebalance._Groups) -> None:
    """Each attempt costs the group a pause; the others, and the leader, may still lead."""
    step = real_groups.transfer(Move("a", N0, N1), 1.0)
    real_groups.look("a")

    assert step.error == "n1 is behind"
    assert real_groups.placement().groups["a"].unable == {N1: "n1 is behind"}


def test_who_cannot_lead_is_known_beforehand() -> None:
    """A transfer would cost the group a pause for nothing."""
    status: NodeStatus = FakeNode().status()

    assert _why_unable(replace(status, voter=True)) == ""
    assert "does not answer" in _why_unable(RequestTimeoutError("no answer"))
    assert "does not answer" in _why_unable(None)
    assert "caught up" in _why_unable(replace(status, voter=False))
    assert "make room" in _why_unable(replace(status, voter=True, disk_full=True))
