"""What the console knows of all groups: registrations, answers, what is remembered, and for how long."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from dledger_cli.console.fleet import BROKERS_MAX, REMEMBER_MS, Fleet
from dledger_cli.console.history import EVENTS_MAX
from rocketstore.remoting.runtime import RuntimeInfo
from rocketstore.remoting.topics import BrokerData, ClusterInfo

A, B = "s:1", "s:2"
MEMBERS = (("n0", "h:0"), ("n1", "h:1"), ("n2", "h:2"))
JAVA = RuntimeInfo("V4_9_7", 5.0, 2.0)


def info(
    number: int, role: str = "FOLLOWER", term: int = 1, members: tuple[tuple[str, str], ...] = MEMBERS
) -> RuntimeInfo:
    return RuntimeInfo("V4_9_8", 3.0, 4.0, "1.0", f"n{number}", role, term, members)


def registered(**groups: dict[int, str]) -> ClusterInfo:
    """Groups of one cluster: addresses by broker id."""
    return ClusterInfo({name: BrokerData("c", name, addresses) for name, addresses in groups.items()})


def three() -> Fleet:
    """A group g of three, all of which have answered; n0 is the master."""
    fleet = Fleet([A, B])
    fleet.heard(A, registered(g={0: "h:0", 2: "h:1", 3: "h:2"}), 0)
    for number in range(3):
        fleet.answered(f"h:{number}", info(number, "LEADER" if number == 0 else "FOLLOWER"), 1)
    return fleet


def shown(fleet: Fleet, name: str = "g", after: int = -1) -> Any:  # noqa: ANN401  # JSON
    groups: Any = fleet.update(after, 10)["groups"]
    return {one["name"]: one for one in groups}.get(name)


def states(fleet: Fleet, name: str = "g") -> list[tuple[str, str]]:
    return [(one["address"], one["state"]) for one in shown(fleet, name)["members"]]


def texts(fleet: Fleet) -> list[str]:
    events: Any = fleet.snapshot(10)["events"]
    return [one["text"] for one in events]


def number_of(fleet: Fleet) -> int:
    number = fleet.snapshot(10)["number"]
    assert isinstance(number, int)
    return number


def test_a_group_is_shown_with_what_its_members_say() -> None:
    """The master's puts, everyone's gets, the highest term."""
    group = shown(three())

    assert (group["level"], group["term"], group["puts"], group["gets"]) == ("good", 1, 3.0, 12.0)
    assert (group["kind"], group["cluster"]) == ("ours", "c")
    assert [(one["node"], one["state"]) for one in group["members"]] == [
        ("n0", "master"),
        ("n1", "slave"),
        ("n2", "slave"),
    ]


def test_a_page_gets_only_groups_that_changed() -> None:
    """And the list of names only when one came or went."""
    fleet = three()
    fleet.heard(A, registered(g={0: "h:0", 2: "h:1", 3: "h:2"}, other={0: "j:0"}), 2)
    seen = number_of(fleet)

    fleet.answered("h:1", info(1), 3)
    assert (shown(fleet, after=seen), fleet.update(seen, 3)["names"]) == (None, None)

    fleet.answered("h:1", info(1, term=2), 4)
    assert shown(fleet, after=seen)["term"] == 2
    assert shown(fleet, "other", after=seen) is None
    assert fleet.snapshot(5)["names"] == ["g", "other"]


def test_a_silent_broker_is_shown_as_such_after_two_requests() -> None:
    """One may be lost; a refused connection is no accident."""
    fleet = three()
    fleet.failed("h:1", "no answer", 5, unreachable=False)
    assert ("h:1", "slave") in states(fleet)

    fleet.failed("h:1", "no answer", 7, unreachable=False)
    fleet.failed("h:2", "Connection refused", 7, unreachable=True)

    assert states(fleet)[1:] == [("h:1", "silent"), ("h:2", "silent")]
    member = shown(fleet)["members"][1]
    assert (member["note"], member["since_ms"]) == ("no answer", 5)
    assert shown(fleet)["verdict"] == "no majority"
    fleet.answered("h:1", info(1), 8)
    assert shown(fleet)["verdict"] == "a member is unreachable"


def test_what_a_silent_master_said_last_is_no_rate() -> None:
    """Nobody puts anything there."""
    fleet = three()
    fleet.failed("h:0", "Connection refused", 5, unreachable=True)

    assert (shown(fleet)["puts"], shown(fleet)["gets"]) == (None, 8.0)
    assert shown(fleet)["verdict"] == "master unreachable"


def test_no_sum_of_rates_ends_the_console() -> None:
    """Whoever registers with a name server tells its rate, and JSON has no infinity."""
    fleet = three()
    for number in range(3):
        fleet.answered(f"h:{number}", replace(info(number), get_tps=1e308), 5)

    assert 0 < shown(fleet)["gets"] < math.inf


def test_a_broker_that_refuses_to_tell_is_not_called_silent() -> None:
    """Access control, for example: it is there."""
    fleet = three()
    fleet.refused("h:1", "no such access key\x1b[31m", 5)

    assert ("h:1", "slave") in states(fleet)
    assert shown(fleet)["verdict"] == "refuses to tell"
    assert shown(fleet)["members"][1]["note"] == "no such access key\\x1b[31m"


def test_members_that_others_tell_of_are_missed() -> None:
    """The console never saw them, and name servers forget the dead at once."""
    fleet = Fleet([A])
    fleet.heard(A, registered(g={0: "h:0"}), 0)
    fleet.answered("h:0", info(0, "LEADER"), 1)

    assert states(fleet) == [("h:0", "master"), ("h:1", "missing"), ("h:2", "missing")]
    assert [one["node"] for one in shown(fleet)["members"]] == ["n0", "n1", "n2"]
    assert (shown(fleet)["verdict"], shown(fleet)["level"]) == ("no majority", "bad")


def test_members_registered_by_other_names_are_not_missed() -> None:
    """What members call each other need not be what clients use."""
    fleet = Fleet([A])
    fleet.heard(A, registered(g={0: "x:0", 2: "x:1", 3: "x:2"}), 0)
    fleet.answered("x:0", info(0, "LEADER"), 1)

    assert [state for _, state in states(fleet)] == ["master", "unknown", "unknown"]


def test_who_is_no_longer_registered_is_remembered_for_a_while() -> None:
    """Its group, too: a card that vanishes tells nobody anything. It goes on being asked."""
    fleet = Fleet([A])
    fleet.heard(A, registered(j={0: "j:0", 1: "j:1"}, k={0: "k:0"}), 0)
    for address in ("j:0", "j:1", "k:0"):
        fleet.answered(address, JAVA, 1)
    fleet.heard(A, registered(j={0: "j:0"}), 100)

    assert states(fleet, "j") == [("j:0", "master"), ("j:1", "missing")]
    assert shown(fleet, "j")["members"][1]["since_ms"] == 100
    assert shown(fleet, "k")["verdict"] == "not registered"
    assert set(fleet.addresses()) == {"j:0", "j:1", "k:0"}

    fleet.heard(A, registered(j={0: "j:0"}), 101 + REMEMBER_MS)
    assert fleet.snapshot(0)["names"] == ["j"]
    assert states(fleet, "j") == [("j:0", "master")]
    assert fleet.addresses() == ("j:0",)


def test_who_comes_back_is_not_shown_twice() -> None:
    """As the master, perhaps, at the same address."""
    fleet = Fleet([A])
    fleet.heard(A, registered(j={0: "j:0", 1: "j:1"}), 0)
    fleet.heard(A, registered(j={0: "j:1"}), 1)
    fleet.heard(A, registered(j={0: "j:1", 1: "j:0"}), 2)
    for address in ("j:0", "j:1"):
        fleet.answered(address, JAVA, 3)

    assert states(fleet, "j") == [("j:1", "master"), ("j:0", "slave")]
    assert fleet.master_of("j") == "j:1"


def test_what_name_servers_know_together_counts() -> None:
    """A restarted one is empty for half a minute; a group may be unable to reach one of them."""
    fleet = Fleet([A, B])
    fleet.heard(A, registered(g={0: "h:0", 2: "h:1"}), 0)
    fleet.heard(B, registered(g={2: "h:1"}, other={0: "o:0"}), 0)

    assert fleet.snapshot(0)["names"] == ["g", "other"]
    assert fleet.master_of("g") == "h:0"
    servers: Any = fleet.snapshot(0)["name_servers"]
    assert [(one["state"], one["brokers"]) for one in servers] == [("answers", 2), ("answers", 2)]


def test_one_silent_name_server_is_no_harm_and_is_told() -> None:
    """What only it knew is remembered as no longer registered."""
    fleet = three()
    fleet.unheard(A, "refused", 50)
    fleet.heard(B, registered(g={0: "h:0", 2: "h:1", 3: "h:2"}), 51)

    assert shown(fleet)["level"] == "good"
    overall: Any = fleet.snapshot(60)["overall"]
    assert (overall["level"], overall["title"]) == ("warn", "The only group serves")
    assert "name server s:1 does not answer" in texts(fleet)
    fleet.heard(A, registered(g={0: "h:0", 2: "h:1", 3: "h:2"}), 70)
    assert "name server s:1 answers again" in texts(fleet)


def test_without_any_name_server_the_last_registrations_stay() -> None:
    """The brokers may be well; that clients cannot find them is told."""
    fleet = three()
    fleet.unheard(A, "refused", 50)
    fleet.unheard(B, "refused", 50)

    overall: Any = fleet.snapshot(60)["overall"]
    assert (overall["level"], overall["title"]) == ("bad", "No name server answers")
    assert shown(fleet)["level"] == "good"
    assert fleet.snapshot(60)["registered_ms"] == 0


def test_no_more_brokers_are_asked_than_the_page_has_room_for() -> None:
    """Whole groups; how many were left out is told."""
    groups = {f"g{number:03}": {0: f"h{number}:0", 1: f"h{number}:1", 2: f"h{number}:2"} for number in range(100)}
    fleet = Fleet([A])
    fleet.heard(A, registered(**groups, **{"x" * 300: {0: "x:0"}}), 0)

    assert len(fleet.addresses()) == BROKERS_MAX
    assert fleet.snapshot(0)["left_out"] == 300 - BROKERS_MAX + 1
    names: Any = fleet.snapshot(0)["names"]
    assert names == sorted(groups)[: BROKERS_MAX // 3]


def test_brokers_with_ever_new_addresses_are_not_remembered_without_end() -> None:
    """Those that were gone first are dropped first."""
    fleet = Fleet([A])
    for number in range(BROKERS_MAX + 50):
        fleet.heard(A, registered(j={0: f"j:{number}"}), number)

    assert len(fleet.addresses()) == BROKERS_MAX
    assert f"j:{BROKERS_MAX + 49}" in fleet.addresses()
    assert "j:0" not in fleet.addresses()


def test_changes_are_events() -> None:
    """A new master, a group that stops serving, one that serves again; a page that knows them gets none twice."""
    fleet = three()
    assert texts(fleet) == []
    fleet.heard(A, registered(g={2: "h:1", 3: "h:2"}), 5)
    fleet.heard(A, registered(g={0: "h:1", 1: "h:0", 3: "h:2"}), 6)
    fleet.answered("h:1", info(1, "LEADER", 2), 7)

    told = texts(fleet)
    assert told[0] == "g: no master"
    assert told[-1] == "g: serving"
    assert fleet.update(number_of(fleet), 8)["events"] == []
    fleet.heard(A, registered(g={0: "h:2", 1: "h:0", 2: "h:1"}), 9)
    assert "g: n2 is the master now" in texts(fleet)


def test_events_are_bounded() -> None:
    """A group that comes and goes all day."""
    fleet = three()
    for number in range(EVENTS_MAX):
        fleet.unheard(A, "refused", number)
        fleet.heard(A, registered(), number)

    assert len(texts(fleet)) == EVENTS_MAX


def test_foreign_groups_are_known_as_such() -> None:
    """RocketMQ's own brokers have no inside that we could show."""
    fleet = Fleet([A])
    fleet.heard(A, registered(j={0: "j:0"}), 0)
    assert not fleet.is_foreign("j")

    fleet.answered("j:0", JAVA, 1)

    assert fleet.is_foreign("j")
    assert not fleet.is_foreign("nobody")
    assert fleet.addresses_of("nobody") is None
    assert shown(fleet, "j")["term"] == 0


def test_late_answers_of_forgotten_brokers_are_dropped() -> None:
    """They would be remembered without end."""
    fleet = Fleet([A])
    fleet.answered("h:0", JAVA, 0)
    fleet.failed("h:0", "e", 0, unreachable=True)
    fleet.refused("h:0", "e", 0)

    assert fleet.addresses() == ()
