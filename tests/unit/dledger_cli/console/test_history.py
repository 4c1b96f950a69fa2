"""What the console remembers: who leads, since when, for how long nobody did; bounded, and told in parts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from dledger.errors import RequestTimeoutError, UnavailableError
from dledger.monitoring import Condition, ConditionKind
from dledger_cli.console import history as module
from dledger_cli.console.history import History
from dledger_cli.console.probe import BrokerSummary, MembershipSummary, NodeState
from tests.unit.dledger_cli.console.support import answer, summary

GONE = UnavailableError("h:1 is unreachable")
LATE = RequestTimeoutError("no answer from h:1 in time")
T0 = 1_700_000_000_000


@pytest.fixture
def known() -> History:
    return three_nodes()


def three_nodes(on_change: Callable[[], None] = lambda: None) -> History:
    """n0 leads in term 1."""
    made = History(["h:1", "h:2", "h:3"], on_change)
    made.answered("h:1", answer(summary("n0", NodeState.LEADER)), T0)
    made.answered("h:2", answer(summary("n1")), T0)
    made.answered("h:3", answer(summary("n2")), T0)
    return made


def present(history: History, now_ms: int = T0) -> dict[str, Any]:
    """The snapshot; untyped, because it is JSON."""
    return history.snapshot(now_ms)


def node(history: History, name: str) -> dict[str, Any]:
    """One node of it."""
    found: dict[str, Any] = next(one for one in present(history)["nodes"] if one["node"] == name)
    return found


def texts(history: History) -> list[str]:
    """What happened."""
    return [one["text"] for one in present(history)["events"]]


def test_the_leader_of_the_newest_term_leads_even_while_an_old_one_has_not_noticed(known: History) -> None:
    """A paused leader still says LEADER with its last word; another node's newer term wins."""
    known.answered("h:2", answer(summary("n1", NodeState.LEADER, term=2)), T0 + 500)

    assert present(known)["group"]["leader"] == "n1"
    assert present(known)["group"]["term"] == 2


def test_a_killed_leader_is_unreachable_at_once_and_its_successor_tells_how_long_nobody_led(known: History) -> None:
    """``gap_ms`` is from the old leader's last answer to the new one's first."""
    known.failed("h:1", GONE, T0 + 400, silent=False)
    assert node(known, "n0")["state"] == "unreachable"
    assert present(known)["group"]["leader"] == ""

    known.answered("h:3", answer(summary("n2", NodeState.LEADER, term=2)), T0 + 900)

    assert present(known)["events"][-1]["gap_ms"] == 900
    assert texts(known)[-2:] == ["n0 stopped answering", "n2 leads in term 2"]


def test_why_a_node_does_not_respond_does_not_repeat_its_address(known: History) -> None:
    """There is little room, and the address stands above."""
    known.failed("h:1", UnavailableError("h:1 is unreachable: connection refused"), T0 + 400, silent=False)

    assert node(known, "n0")["error"] == "connection refused"


def test_a_leader_that_led_before_the_first_look_has_led_for_an_unknown_time(known: History) -> None:
    """The console's own start is not its begin."""
    assert present(known)["group"]["leader_began"] is False
    assert texts(known)[0] == "n0 already led in term 1"

    known.answered("h:2", answer(summary("n1", NodeState.LEADER, term=2)), T0 + 500)

    assert present(known)["group"]["leader_began"] is True


def test_a_leader_elected_after_the_first_look_was_seen_to_begin() -> None:
    """Every node had answered, and none led."""
    made = History(["h:1", "h:2", "h:3"])
    for number in range(3):
        made.answered(f"h:{number + 1}", answer(summary(f"n{number}")), T0)
    made.answered("h:1", answer(summary("n0", NodeState.LEADER)), T0 + 500)

    assert present(made)["group"]["leader_began"] is True
    assert "n0 leads in term 1" in texts(made)


def test_a_leader_says_since_when_it_leads() -> None:
    """So a console that starts later knows it as well, and a restart of the console changes nothing."""
    made = History(["h:1", "h:2", "h:3"])
    made.answered("h:1", answer(summary("n0", NodeState.LEADER, role_age_ms=60_000)), T0)

    group = present(made)["group"]
    assert (group["leader_since_ms"], group["leader_began"]) == (T0 - 60_000, True)
    assert [(one["at_ms"], one["text"]) for one in present(made)["events"]] == [(T0 - 60_000, "n0 leads in term 1")]
    assert node(made, "n0")["since_ms"] == T0 - 60_000


def test_no_node_can_have_led_since_before_all_time() -> None:
    """Whatever it says."""
    made = History(["h:1", "h:2", "h:3"])
    made.answered("h:1", answer(summary("n0", NodeState.LEADER, role_age_ms=1 << 62)), T0)

    assert present(made)["group"]["leader_since_ms"] == 0
    assert present(made)["events"][0]["at_ms"] >= 0


def test_an_election_is_told_at_its_own_time_and_not_when_it_was_seen(known: History) -> None:
    """The time without a leader ends with the election, too."""
    known.answered("h:1", answer(summary("n0", NodeState.LEADER)), T0 + 1000)
    known.failed("h:1", GONE, T0 + 2000, silent=False)
    known.answered("h:3", answer(summary("n2", NodeState.LEADER, term=2, role_age_ms=700)), T0 + 3000)

    newest = present(known)["events"][-1]
    assert (newest["text"], newest["at_ms"], newest["gap_ms"]) == ("n2 leads in term 2", T0 + 2300, 1300)
    assert present(known)["group"]["leader_since_ms"] == T0 + 2300


def test_a_leader_that_was_out_of_sight_did_not_begin_again(known: History) -> None:
    """Its role is older than the gap: the console missed it, nobody else led. The gap on its strip stays."""
    known.failed("h:1", GONE, T0 + 2000, silent=False)
    known.answered("h:1", answer(summary("n0", NodeState.LEADER, role_age_ms=90_000)), T0 + 5000)

    newest = present(known)["events"][-1]
    assert (newest["text"], newest["at_ms"], newest["gap_ms"]) == ("n0 leads in term 1", T0 + 5000, 5000)
    assert present(known)["group"]["leader_since_ms"] == T0 + 5000 - 90_000
    assert [one[2:4] for one in present(known)["changes"] if one[1] == "n0"] == [
        [T0, "leader"],
        [T0 + 2000, "unreachable"],
        [T0 + 5000, "leader"],
    ]


def test_changes_of_a_node_stay_in_order_whatever_it_says(known: History) -> None:
    """A clock that runs faster there, or an answer that took long."""
    known.answered("h:2", answer(summary("n1", NodeState.CANDIDATE, term=2)), T0 + 1000)
    known.answered("h:2", answer(summary("n1", NodeState.FOLLOWER, term=2, role_age_ms=9000)), T0 + 1500)

    times = [one[2] for one in present(known)["changes"] if one[1] == "n1"]
    assert times == [T0, T0 + 1000, T0 + 1000]


def test_what_is_the_matter_with_a_node_is_an_event_when_it_begins_and_when_it_ends(known: History) -> None:
    """Also across a time in which the node did not answer; the node's summary names what holds."""
    damaged = Condition("damaged", "entry 7 is wrong", T0, "/data/00000000000000000000")
    known.answered("h:2", answer(summary("n1", conditions=(damaged,))), T0 + 500)
    known.answered("h:2", answer(summary("n1", conditions=(damaged,))), T0 + 1000)
    assert texts(known)[-1] == "n1 is damaged (/data/00000000000000000000): entry 7 is wrong"
    assert [one["kind"] for one in node(known, "n1")["facts"]["conditions"]] == ["damaged"]

    known.failed("h:2", GONE, T0 + 1500, silent=False)
    known.answered("h:2", answer(summary("n1")), T0 + 2000)

    assert texts(known)[-3:] == [
        "n1 stopped answering",
        "n1 is no longer damaged (/data/00000000000000000000)",
        "n1 answers again",
    ]


@pytest.mark.parametrize("kind", [*ConditionKind, "sleepy"])
def test_what_is_the_matter_is_told_in_sentences(known: History, kind: str) -> None:
    """Of every kind, and of one that a later version may tell."""
    known.answered("h:2", answer(summary("n1", conditions=(Condition(kind, "because of it", T0),))), T0 + 500)
    known.answered("h:2", answer(summary("n1")), T0 + 1000)

    begins, ends = texts(known)[-2:]
    assert re.fullmatch(r"n1 (is|has|does not) [a-z ]+: because of it", begins)
    assert re.fullmatch(r"n1 (is no longer|has|replicates) [a-z ]+", ends)
    assert not re.search("no longer no", ends)


def test_a_silent_node_is_unreachable_only_after_a_while(known: History) -> None:
    """One late answer on a busy machine is no failure; 1.5 s without any is."""
    known.failed("h:1", LATE, T0 + 800, silent=True)
    assert node(known, "n0")["state"] == "leader"

    known.failed("h:1", LATE, T0 + module.SILENT_MS, silent=True)
    assert node(known, "n0")["state"] == "unreachable"


def test_a_node_that_answers_again_is_said_to(known: History) -> None:
    """And keeps what was known of its log while it was away."""
    known.failed("h:1", GONE, T0 + 400, silent=False)
    assert node(known, "n0")["facts"]["end"] == 9

    known.answered("h:1", answer(summary("n0", term=2)), T0 + 5000)

    assert texts(known)[-1] == "n0 answers again"
    assert [one[3] for one in present(known)["changes"] if one[1] == "n0"] == ["leader", "unreachable", "follower"]


def test_members_that_never_answered_get_a_lane_at_the_address_that_others_know() -> None:
    """One given address is enough to see the whole group."""
    history = History(["h:1"])

    history.answered("h:1", answer(summary("n0", NodeState.LEADER)), T0)

    assert [one["node"] for one in present(history)["nodes"]] == ["n0", "n1", "n2"]
    assert history.addresses() == ("h:1", "h:2", "h:3")
    assert node(history, "n1")["state"] == "unknown"


def test_a_given_address_stays_the_way_to_a_node_that_names_itself_otherwise() -> None:
    """Names of containers need not resolve here; the address that answered does."""
    history = History(["localhost:1"])

    history.answered("localhost:1", answer(summary("n0", NodeState.LEADER)), T0)

    assert node(history, "n0")["address"] == "localhost:1"


def test_a_given_address_at_which_nobody_answers_is_shown_until_the_members_explain_it() -> None:
    """Before anybody answered it is all there is; afterwards it may be any member's that did not."""
    history = History(["h:1", "other:9"])
    history.failed("other:9", GONE, T0, silent=False)
    assert [one["node"] for one in present(history)["nodes"]] == ["h:1", "other:9"]

    history.answered("h:1", answer(summary("n0", NodeState.LEADER)), T0)
    assert [one["node"] for one in present(history)["nodes"]] == ["n0", "n1", "n2"]

    history.answered("h:2", answer(summary("n1")), T0)
    history.answered("h:3", answer(summary("n2")), T0)
    assert [one["node"] for one in present(history)["nodes"]][-1] == "other:9"


def test_a_node_of_another_group_gets_no_lane(known: History) -> None:
    """It is named where its address stands."""
    history = History(["h:1", "h:9"])
    history.answered("h:1", answer(summary("n0", NodeState.LEADER, members=(("n0", "h:1"),))), T0)

    history.answered("h:9", answer(summary("n7", group="elsewhere")), T0)

    assert [one["node"] for one in present(history)["nodes"]] == ["n0", "h:9"]
    assert "group elsewhere" in node(history, "h:9")["error"]


def test_rates_come_from_how_far_the_committed_index_moved(known: History) -> None:
    """20 entries and 4,000 bytes in two seconds."""
    later = summary("n0", NodeState.LEADER, committed=29, end=29, end_position=4900)

    known.answered("h:1", answer(later), T0 + 2000)

    point = present(known)["points"][-1]
    assert point["entries_per_s"] == 10
    assert point["bytes_per_s"] == 2000


def test_a_commit_index_that_falls_back_gives_a_gap_and_no_negative_rate(known: History) -> None:
    """A node that was restarted learns anew what is committed."""
    for address, name in (("h:2", "n1"), ("h:3", "n2")):
        known.failed(address, GONE, T0 + 100, silent=False)
        assert node(known, name)["state"] == "unreachable"

    known.answered("h:1", answer(summary("n0", NodeState.LEADER, committed=3)), T0 + 2000)

    assert present(known)["points"][-1]["entries_per_s"] is None


def test_puts_and_gets_are_the_leading_brokers(known: History) -> None:
    """Followers count what they serve; the master is meant."""
    broker = BrokerSummary("c", "b", "SYNC_MASTER", 12.5, 3.0, 0, 0.5, 1)
    known.answered("h:2", answer(summary("n1"), broker=BrokerSummary("c", "b", "SLAVE", 0.0, 99.0, 0, 0.5, 1)), T0 + 1)

    known.answered("h:1", answer(summary("n0", NodeState.LEADER), broker=broker), T0 + 2000)

    assert present(known)["points"][-1]["puts_per_s"] == 12.5
    assert present(known)["points"][-1]["gets_per_s"] == 3.0
    assert known.kind == "brokers"


def test_lag_is_what_the_leader_counts_or_less() -> None:
    """Nodes are not asked at the same moment, so an end may be newer than the leader's; and a new leader's count of a
    dead node is of nothing known."""
    history = History(["h:1", "h:2", "h:3"])
    leader = summary("n0", NodeState.LEADER, end=100, lags=(("n1", 5), ("n2", 101)))
    history.answered("h:2", answer(summary("n1", end=103)), T0)
    history.answered("h:3", answer(summary("n2", end=60)), T0)
    history.answered("h:1", answer(leader), T0)

    assert [node(history, name)["facts"]["lag"] for name in ("n0", "n1", "n2")] == [0, 0, 40]


def test_an_update_tells_only_what_is_new(known: History) -> None:
    """Pages get changes, events and points behind the number they know."""
    number = present(known)["number"]
    assert known.update(number, T0)["changes"] == []

    known.failed("h:3", GONE, T0 + 5000, silent=False)
    update: dict[str, Any] = known.update(number, T0 + 5000)

    assert [one[1:] for one in update["changes"]] == [["n2", T0 + 5000, "unreachable", 1]]
    assert [one["text"] for one in update["events"]] == ["n2 stopped answering"]
    assert len(update["points"]) == 1
    assert update["number"] > number


def test_everything_that_is_remembered_is_bounded(known: History) -> None:
    """A node that flaps for ever, a console that runs for ever."""
    for number in range(2500):
        at = T0 + 10_000 + number * 1000
        known.failed("h:3", GONE, at, silent=False)
        known.answered("h:3", answer(summary("n2")), at + 500)

    found = present(known)
    assert len([one for one in found["changes"] if one[1] == "n2"]) == module.CHANGES_MAX
    assert len(found["events"]) == module.EVENTS_MAX
    assert len(found["points"]) == module.POINTS_MAX
    assert [one[3] for one in found["changes"] if one[1] == "n0"] == ["leader"]


def test_a_member_list_without_end_gets_lanes_up_to_a_limit() -> None:
    """Whatever a node claims."""
    history = History(["h:1"])

    history.answered("h:1", answer(summary("n0", members=tuple((f"n{n}", f"h:{n}") for n in range(500)))), T0)

    assert len(present(history)["nodes"]) == module.NODES_MAX


def test_a_change_calls_back_and_a_repetition_does_not() -> None:
    """What makes pages hear at once."""
    calls: list[int] = []
    known = three_nodes(lambda: calls.append(1))
    calls.clear()

    known.answered("h:1", answer(summary("n0", NodeState.LEADER)), T0 + 1)
    assert calls == []

    known.answered("h:2", answer(summary("n1", NodeState.CANDIDATE)), T0 + 2)
    assert calls == [1]
    assert texts(known)[-1] == "n1 is a candidate (term 1)"


def test_a_group_is_unsettled_without_a_leader_and_just_after_and_not_for_ever(known: History) -> None:
    """It is sampled more often then."""
    assert known.unsettled(T0 + 100)
    assert not known.unsettled(T0 + 5000)

    known.failed("h:1", GONE, T0 + 6000, silent=False)
    assert known.unsettled(T0 + 6100)
    assert not known.unsettled(T0 + 60_000)


def test_a_plain_broker_is_a_lane_of_its_own_kind() -> None:
    """Its positions are bytes; nobody leads."""
    history = History(["h:1"])
    plain = summary("broker-a", NodeState.PLAIN, term=0, members=(), unit="bytes", end=5000, committed=5000)

    history.answered("h:1", answer(plain, broker=BrokerSummary("c", "broker-a", "ASYNC_MASTER", 1, 2, 0, 0, 1)), T0)

    found = present(history)
    assert (found["group"]["kind"], found["group"]["unit"], found["group"]["leader"]) == ("broker", "bytes", "")
    assert found["points"][-1]["puts_per_s"] == 1
    assert found["points"][-1]["entries_per_s"] is None
    assert not history.unsettled(T0)


# --- the members ------------------------------------------------------------------------------------------------------


def memberships(*nodes: str, learners: tuple[str, ...] = ()) -> tuple[MembershipSummary, ...]:
    """What a leader tells of them."""
    voters = [MembershipSummary(one, "voter", f"{one}:1", "") for one in nodes]
    return (
        *voters,
        *(MembershipSummary(one, "learner", f"{one}:1", "becomes a voter", percent=40) for one in learners),
    )


def leader_tells(history: History, index: int, *nodes: str, learners: tuple[str, ...] = (), term: int = 1) -> None:
    """n0 leads, and knows these members."""
    told = memberships(*nodes, learners=learners)
    shown = tuple((one.node, f"{one.node}:9") for one in told)
    made = summary("n0", NodeState.LEADER, term, configuration=index, memberships=told, members=shown)
    history.answered("h:1", answer(made), T0 + index)


def test_members_come_change_and_go_with_an_event_each(known: History) -> None:
    """Learners are no voters, and say how far they are."""
    leader_tells(known, 1, "n0", "n1", "n2")
    leader_tells(known, 2, "n0", "n1", "n2", learners=("n4",))
    assert texts(known)[-1] == "n4 was added as a learner: becomes a voter"
    assert present(known)["group"]["voters"] == ["n0", "n1", "n2"]
    assert (node(known, "n4")["member"]["percent"], node(known, "n4")["state"]) == (40, "unknown")

    leader_tells(known, 3, "n0", "n1", "n2", "n4")
    leader_tells(known, 4, "n0", "n1", "n4")

    assert texts(known)[-2:] == ["n4 is a voter now", "n2 was removed from the group"]
    assert present(known)["group"]["voters"] == ["n0", "n1", "n4"]


def test_a_removed_member_is_shown_while_it_answers_and_is_not_missed(known: History) -> None:
    """Somebody may still have to stop it; afterwards it is nobody's loss, whatever it or others had said."""
    leader_tells(known, 4, "n0", "n1")
    known.answered("h:3", answer(summary("n2", configuration=1, memberships=memberships("n0", "n1", "n2"))), T0 + 10)
    assert (node(known, "n2")["removed"], node(known, "n1")["removed"]) == (True, False)

    known.failed("h:3", GONE, T0 + 20, silent=False)
    known.answered("h:2", answer(summary("n1", configuration=1, memberships=memberships("n0", "n1", "n2"))), T0 + 30)

    assert [one["node"] for one in present(known)["nodes"]] == ["n0", "n1"]


def test_a_change_that_is_undone_brings_the_members_back(known: History) -> None:
    """The next leader's word counts, although its configuration is the older one."""
    leader_tells(known, 8, "n0", "n1")
    made = summary("n1", NodeState.LEADER, 2, configuration=1, memberships=memberships("n0", "n1", "n2"))
    known.answered("h:2", answer(made), T0 + 20)

    assert present(known)["group"]["voters"] == ["n0", "n1", "n2"]
