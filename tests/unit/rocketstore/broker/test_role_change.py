"""A broker's role follows its node's: when puts are taken, what is waited for, and in which order things happen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dledger.core.messages import RoleChange
from dledger.errors import CorruptLogError, DLedgerError, LeaderHint, TransferFailedError
from dledger.monitoring import ConditionKind, Conditions
from dledger.rpc.ports import CommitEvent, MemberStatus, NodeEvent, NodeStatus
from dledger.types import LogIndex, NodeId, Role, Term
from rocketstore.broker import role_change
from rocketstore.broker.role_change import FAILURES_MAX, BrokerRoleChange
from rocketstore.state.broker_state import StateBlockedError, StateIncompleteError
from rocketstore.types import BrokerRole
from tests.support.fake_node import FakeNode
from tests.support.waiting import wait_until

N0, N1 = NodeId("n0"), NodeId("n1")


class FakeBroker:
    """All that a role change touches, in one: what was called, in order; steps can be made to fail or to wait."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.error: Exception | None = None
        self.failures: dict[str, int] = {}
        """How often the named step still fails."""
        self.held: dict[str, threading.Event] = {}
        """The named step waits for this."""
        self.dispatched = threading.Event()
        self.dispatched.set()
        self.dispatch_waits = 0
        self.dispatch_behind_bytes = 70_000
        self.damage: CorruptLogError | None = None
        self.master = True  # until it is told otherwise
        self.open: int | None = None
        self.listeners: list[Callable[[NodeEvent], None]] = []
        members = tuple(MemberStatus(NodeId(f"n{number}"), f"host:{number}") for number in range(3))
        self.node = replace(FakeNode().status(), role=Role.LEADER, term=Term(1), end_index=LogIndex(5), members=members)
        self.conditions = Conditions("n0")
        self.offers: list[NodeId | None] = []
        self.commit(5)

    def note(self, name: str) -> None:
        self.calls.append(name)
        if name in self.held:
            assert self.held[name].wait(60)
        if self.failures.get(name, 0):
            self.failures[name] -= 1
            raise self.error or OSError(f"{name} failed")

    # The member.

    def status(self) -> NodeStatus:
        return self.node

    def subscribe(self, listener: Callable[[NodeEvent], None]) -> Callable[[], None]:
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    def submit_transfer(self, target: NodeId | None, done: Callable[[LeaderHint | DLedgerError], None]) -> None:
        self.offers.append(target)
        done(TransferFailedError("not now"))

    def commit(self, index: int, **changes: Any) -> None:  # noqa: ANN401 - as replace() has it
        self.node = replace(self.node, committed_index=LogIndex(index), **changes)
        for listener in tuple(self.listeners):
            listener(CommitEvent(LogIndex(index)))

    # The log's gate and the store.

    def open_term(self, term: Term) -> None:
        self.open = term

    def close_term(self) -> None:
        self.open = None

    def become_slave(self) -> None:
        self.master = False
        self.note("slave")

    def become_master(self, role: BrokerRole) -> None:
        self.note(f"{role}")
        self.master = True

    def rebuild_queue_offsets(self) -> None:
        assert not self.master
        self.note("rebuild")

    @property
    def dispatch_damage(self) -> CorruptLogError | None:
        return self.damage

    def wait_dispatched(self, timeout: float) -> bool:
        self.dispatch_waits += 1
        return self.dispatched.wait(timeout)

    # The broker state and the schedule.

    def catch_up(self, *, cancelled: threading.Event) -> None:
        self.note("catch up")

    def start(self) -> None:
        self.note("start")

    def stop(self) -> None:
        self.note("stop")


class Bench:
    """A role change under test. Its node's role-change thread is the test."""

    def __init__(self) -> None:
        self.broker = broker = FakeBroker()
        self.told: list[BrokerRole] = []
        parts: Any = broker  # in the place of node, log, store, state and schedule
        self.roles = BrokerRoleChange(parts, parts, parts, parts, parts, name="n0", listener=self.told.append)
        self.roles.startup()

    def lead(self, term: int = 1) -> None:
        self.roles.role_changed(RoleChange(Role.LEADER, Term(term), N0))

    def follow(self, term: int = 2, leader: NodeId | None = N1) -> None:
        self.roles.role_changed(RoleChange(Role.FOLLOWER, Term(term), leader))

    def campaign(self, term: int) -> None:
        self.roles.role_changed(RoleChange(Role.CANDIDATE, Term(term), None))

    def wait_master(self) -> None:
        wait_until(lambda: self.told[-1:] == [BrokerRole.SYNC_MASTER], "it is master")

    def steps(self) -> list[str]:
        """What was done since the last demotion, without the service that was stopped first."""
        calls = self.broker.calls
        last = len(calls) - calls[::-1].index("slave")
        return [one for one in calls[last:] if one != "stop"]


PROMOTION = ["catch up", "rebuild", "SYNC_MASTER", "start"]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.roles.shutdown()
    assert not bench.roles._thread.is_alive()
    assert not bench.broker.master
    assert bench.broker.listeners == []


def test_a_broker_starts_as_slave(bench: Bench) -> None:
    """RocketMQ's takes puts until its first event, with a queue table that nobody has rebuilt."""
    assert bench.broker.calls == ["slave"]
    assert (bench.roles.role, bench.broker.open) == (BrokerRole.SLAVE, None)


def test_a_leader_takes_stock_in_order_then_takes_puts_then_starts_its_services(bench: Bench) -> None:
    """State first, queue offsets counted anew, then the gates, then what runs on a master only."""
    bench.lead()
    bench.wait_master()

    assert bench.steps() == PROMOTION
    assert (bench.roles.role, bench.broker.open, bench.broker.master) == (BrokerRole.SYNC_MASTER, 1, True)


def test_promotion_waits_until_everything_is_committed(bench: Bench) -> None:
    """Entries of earlier terms, and the leader's own NOOP: until then they could be lost."""
    bench.broker.commit(3)
    bench.lead()
    wait_until(lambda: bool(bench.broker.listeners), "it waits")
    bench.broker.commit(4)
    assert bench.steps() == []

    bench.broker.commit(5)

    bench.wait_master()


def test_promotion_waits_until_everything_is_dispatched(bench: Bench) -> None:
    """The queue offsets are counted from what dispatch has put into the consume queues."""
    bench.broker.dispatched.clear()
    bench.lead()
    wait_until(lambda: bench.broker.dispatch_waits > 1, "it waits, and looks around while it does")
    assert bench.steps() == []

    bench.broker.dispatched.set()

    bench.wait_master()


def test_a_long_dispatch_is_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no master meanwhile: the log says why, again and again, and how much is left."""
    monkeypatch.setattr(role_change, "DISPATCH_TOLD_S", 0.0)
    bench.broker.dispatched.clear()
    bench.lead()
    wait_until(lambda: "70000 bytes of the log are not dispatched" in caplog.text, "it is told")
    bench.broker.dispatch_behind_bytes = 5
    wait_until(lambda: " 5 bytes of the log are not dispatched" in caplog.text, "it is told again")

    bench.broker.dispatched.set()
    bench.wait_master()


def test_leadership_lost_while_waiting_for_commits_ends_the_promotion(bench: Bench) -> None:
    """And the next one begins from the start."""
    bench.broker.commit(3)
    bench.lead()
    wait_until(lambda: bool(bench.broker.listeners), "it waits")

    bench.follow()
    bench.broker.commit(5)
    wait_until(lambda: not bench.broker.listeners, "it gave up")
    assert bench.steps() == []

    bench.broker.commit(5, term=Term(3))
    bench.lead(3)
    bench.wait_master()
    assert bench.broker.open == 3
    assert bench.told == [BrokerRole.SYNC_MASTER]


def test_leadership_lost_while_waiting_for_dispatch_ends_the_promotion(bench: Bench) -> None:
    """However long dispatch still takes."""
    bench.broker.dispatched.clear()
    bench.lead()
    wait_until(lambda: bench.broker.dispatch_waits > 0, "it waits")

    bench.follow()
    bench.broker.dispatched.set()
    bench.broker.commit(5, term=Term(3))
    bench.lead(3)

    bench.wait_master()
    assert (bench.steps(), bench.broker.open) == (PROMOTION, 3)


def test_a_commit_of_another_term_is_not_enough(bench: Bench) -> None:
    """The news of a term arrives late: the node leads another one by now, and what it has committed is that one's."""
    bench.broker.commit(5, term=Term(7))
    bench.lead(5)
    wait_until(lambda: bool(bench.broker.listeners), "it waits")
    assert bench.steps() == []

    bench.lead(7)

    bench.wait_master()
    assert bench.broker.open == 7


@pytest.mark.parametrize("step", PROMOTION)
def test_a_change_during_a_step_never_leaves_the_gate_open(bench: Bench, step: str) -> None:
    """Demoted while any step is under way: puts are refused at once, or right after the gate has opened."""
    bench.broker.held[step] = threading.Event()
    bench.lead()
    wait_until(lambda: step in bench.broker.calls, "the step is under way")
    demotion = threading.Thread(target=bench.follow)
    demotion.start()
    if step != "SYNC_MASTER":  # which is done as a whole, before the demotion
        demotion.join()
        assert not bench.broker.master
        assert bench.broker.open is None

    bench.broker.held[step].set()

    demotion.join()
    wait_until(lambda: bench.broker.calls[-1] == "stop", "what ran is stopped")
    assert not bench.broker.master
    assert (bench.broker.open, bench.roles.role) == (None, BrokerRole.SLAVE)


@pytest.mark.parametrize("step", PROMOTION)
def test_a_step_that_fails_is_repeated(bench: Bench, step: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without the steps before it; RocketMQ stays a slave that leads, so nobody takes puts."""
    bench.broker.failures[step] = 2
    bench.lead()
    bench.wait_master()

    at = PROMOTION.index(step)
    assert bench.steps() == [*PROMOTION[:at], step, step, *PROMOTION[at:]]
    assert caplog.text.count(f"{step} failed") == 2


def test_a_step_that_keeps_failing_ends_with_the_leadership(bench: Bench) -> None:
    """The pause between two attempts ends, too."""
    bench.broker.failures["catch up"] = 1000
    bench.lead()
    wait_until(lambda: bench.broker.calls.count("catch up") > 1, "it is repeated")

    bench.follow()
    bench.broker.failures.clear()
    bench.broker.commit(5, term=Term(3))
    bench.lead(3)

    bench.wait_master()
    assert bench.steps() == PROMOTION


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts and offers follow each other at once."""
    monkeypatch.setattr(role_change, "RETRY_PAUSE_S", 0.001)
    monkeypatch.setattr(role_change, "RETRY_PAUSE_MAX_S", 0.001)
    monkeypatch.setattr(role_change, "OFFER_PAUSE_S", 0.0)


@pytest.mark.usefixtures("quick")
def test_a_leader_whose_dispatch_waits_for_a_repair_offers_leadership(bench: Bench) -> None:
    """The others have what is damaged here; once it is repaired, it becomes master if it still leads."""
    broker = bench.broker
    broker.dispatched.clear()
    broker.damage = CorruptLogError(Path("data"), 7, "bodyCrc is wrong", "Repair it", 1)
    bench.lead()
    wait_until(lambda: len(broker.offers) >= 2, "it offers leadership")
    assert {one.kind for one in broker.conditions.now()} == {ConditionKind.STUCK_LEADER}

    broker.damage = None
    broker.dispatched.set()
    bench.wait_master()


@pytest.mark.usefixtures("quick")
def test_a_leader_that_may_not_become_master_offers_leadership_to_the_others_in_turn(bench: Bench) -> None:
    """Else nobody takes messages for as long as it leads, although others could; and it says why."""
    broker = bench.broker
    broker.error, broker.failures["catch up"] = StateBlockedError("a newer program's changes"), 1 << 30
    bench.lead()
    wait_until(lambda: len(broker.offers) >= 3, "it offers leadership")

    (condition,) = broker.conditions.now()
    assert (condition.kind, condition.subject) == (ConditionKind.STUCK_LEADER, "broker")
    assert "a newer program's changes" in condition.message
    assert broker.offers[:3] == [N1, NodeId("n2"), N1]

    bench.follow()
    wait_until(lambda: not broker.conditions.now(), "it is over")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("failures", "offers"), [(FAILURES_MAX - 1, 0), (FAILURES_MAX, 1)])
def test_a_failure_that_may_pass_is_waited_for_before_leadership_is_offered(
    bench: Bench, failures: int, offers: int
) -> None:
    """A disk that was full for a moment costs no change of leader."""
    bench.broker.failures["rebuild"] = failures
    bench.lead()
    bench.wait_master()

    assert len(bench.broker.offers) == offers
    wait_until(lambda: bench.broker.conditions.now() == (), "it is over")


def test_leadership_is_not_offered_again_at_once(bench: Bench) -> None:
    """Whoever was asked needs time to take it."""
    bench.broker.error, bench.broker.failures["catch up"] = StateIncompleteError("changes are missing"), 3
    bench.lead()
    bench.wait_master()

    assert bench.broker.offers == [N1]


@pytest.mark.usefixtures("quick")
def test_a_member_that_is_alone_offers_nothing(bench: Bench) -> None:
    """It says that it is stuck, and goes on trying."""
    bench.broker.node = replace(bench.broker.node, members=bench.broker.node.members[:1])
    bench.broker.error, bench.broker.failures["catch up"] = StateBlockedError("newer"), 3
    bench.lead()
    bench.wait_master()

    assert bench.broker.offers == []


def test_puts_are_refused_before_a_demotion_is_over(bench: Bench) -> None:
    """On the thread that brings the news, whatever the services still do."""
    bench.lead()
    bench.wait_master()
    bench.broker.held["stop"] = threading.Event()

    bench.follow()

    assert not bench.broker.master
    assert bench.broker.open is None
    bench.broker.held["stop"].set()
    wait_until(lambda: bench.told == [BrokerRole.SYNC_MASTER, BrokerRole.SLAVE], "told of both")


def test_a_candidate_stays_a_slave(bench: Bench) -> None:
    """Campaign after campaign, a follower of one leader and then of another: nothing to change, nothing to tell."""
    bench.campaign(1)
    bench.campaign(2)
    bench.follow(2, None)
    bench.follow(2, N1)
    bench.campaign(3)

    assert bench.broker.calls == ["slave"]
    assert bench.told == []


def test_one_promotion_makes_one_master(bench: Bench) -> None:
    """Also if the same news came twice."""
    bench.lead()
    bench.lead()
    bench.wait_master()
    bench.lead()
    bench.follow()
    wait_until(lambda: len(bench.told) == 2, "told of both")

    assert bench.broker.calls.count("SYNC_MASTER") == 1
    assert bench.told == [BrokerRole.SYNC_MASTER, BrokerRole.SLAVE]


def test_a_new_term_means_a_new_promotion_even_without_a_fall_in_between(bench: Bench) -> None:
    """The queue offsets of the old one are not to be trusted: refused, stopped, taken stock, and only then master."""
    bench.lead(1)
    bench.wait_master()
    bench.broker.held["catch up"] = threading.Event()

    bench.broker.commit(5, term=Term(3))
    bench.lead(3)

    assert not bench.broker.master
    bench.broker.held["catch up"].set()
    wait_until(lambda: bench.told == ["SYNC_MASTER", "SLAVE", "SYNC_MASTER"], "master again")
    assert bench.steps() == PROMOTION
    assert bench.broker.open == 3


def test_a_stop_makes_a_slave_of_a_master(bench: Bench) -> None:
    """A broker that goes takes no more puts, and its services end."""
    bench.lead()
    bench.wait_master()

    bench.roles.shutdown()
    bench.roles.shutdown()

    assert bench.broker.calls[-1] == "stop" or bench.broker.calls[-2:] == ["stop", "slave"]
    assert bench.told == [BrokerRole.SYNC_MASTER, BrokerRole.SLAVE]


def test_a_stop_does_not_wait_for_what_never_comes() -> None:
    """A promotion without a quorum, and a service that cannot be stopped: that is tried once."""
    bench = Bench()
    bench.broker.commit(3)
    bench.lead()
    wait_until(lambda: bool(bench.broker.listeners), "it waits")
    bench.broker.failures["stop"] = 1000

    bench.roles.shutdown()

    assert not bench.roles._thread.is_alive()
    assert bench.broker.failures["stop"] == 999
