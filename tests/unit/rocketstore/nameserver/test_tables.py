"""What a name server makes of registrations, each rule alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dledger.remoting.codes import RequestError
from rocketstore.nameserver.tables import SILENCE_MS, SYS_FLAG_UNIT, SYS_FLAG_UNIT_SUB, BrokerRegistration, TableLimits
from rocketstore.remoting.topics import DataVersion, QueueData
from tests.unit.rocketstore.nameserver.support import LIMITS, addresses, new_tables, queues_of, registration


def test_a_master_brings_topics_and_slaves_are_told_where_it_is() -> None:
    """RocketMQ's rule: only id 0 says which queues there are."""
    tables = new_tables()

    assert tables.register(registration(1, "b:1", topics=("S",)), "l1", 0) == (True, "", "")
    assert tables.route("S") is None
    assert tables.register(registration(0, "a:1"), "l0", 0) == (True, "", "")
    assert tables.register(registration(1, "b:1", topics=("S",)), "l1", 0) == (True, "a:1", "ha-a:1")

    route = tables.route("T")
    assert route is not None
    assert route.queue_datas == (QueueData("g", 4, 4, 6),)
    assert [(one.cluster, one.broker_name, dict(one.broker_addrs)) for one in route.broker_datas] == [
        ("c", "g", {0: "a:1", 1: "b:1"})
    ]
    assert tables.topics() == tables.topics_of_cluster("c") == ("T",)
    assert tables.topics_of_cluster("other") == ()


def test_topics_change_with_the_version_and_are_never_taken_away() -> None:
    """Registrations of one topic alone are merged; those of the known version change nothing."""
    tables = new_tables()
    tables.register(registration(0, "a:1", version=1), "l", 0)
    tables.register(registration(0, "a:1", version=1, queues=9), "l", 0)
    assert queues_of(tables) == {"g": 4}

    tables.register(registration(0, "a:1", version=2, topics=("U",), queues=2), "l", 0)

    assert tables.topics() == ("T", "U")
    assert (queues_of(tables), queues_of(tables, "U")) == ({"g": 4}, {"g": 2})


def test_topics_that_a_complete_registration_lacks_are_taken_away() -> None:
    """Otherwise the tables fill up with topics that were deleted at the brokers, until no new master is accepted."""
    tables = new_tables(TableLimits(brokers_max=10, addresses_max=20, topics_max=3, places_max=4))
    tables.register(registration(0, "x:1", name="h", topics=("T", "U")), "l", 0)
    tables.register(registration(0, "a:1", version=1, topics=("T", "V"), complete=True), "m", 0)
    tables.delete_topic("V")
    tables.register(registration(0, "a:1", version=1, topics=(), complete=True), "m", 0)  # says nothing new
    assert tables.topics() == ("T", "U")
    tables.register(registration(1, "b:1", version=5, topics=(), complete=True), "n", 0)
    assert queues_of(tables) == {"g": 4, "h": 4}
    tables.register(registration(0, "a:1", version=2, topics=("U", "W"), complete=True), "m", 0)
    assert tables.topics() == ("T", "U", "W")
    assert (queues_of(tables), queues_of(tables, "U")) == ({"h": 4}, {"g": 4, "h": 4})
    tables.register(registration(0, "b:1", version=2, topics=("T",), complete=True), "n", 0)
    assert (queues_of(tables), queues_of(tables, "U"), tables.topics()) == ({"g": 4, "h": 4}, {"h": 4}, ("T", "U"))
    assert tables.sizes() == (2, 2, 2, 3)


def test_a_topic_whose_registration_was_lost_comes_with_the_next_full_one() -> None:
    """In Java it stays away until something else changes: the version is known."""
    tables = new_tables()
    tables.register(registration(0, "a:1", version=1, topics=("T",)), "l", 0)
    # version 2, of topic U alone, never arrives
    tables.register(registration(0, "a:1", version=3, topics=("V",)), "l", 0)
    tables.wipe_write("g")

    tables.register(registration(0, "a:1", version=3, topics=("T", "U", "V")), "l", 0)

    assert tables.topics() == ("T", "U", "V")
    permissions = [route.queue_datas[0].perm for topic in ("T", "U", "V") if (route := tables.route(topic))]
    assert permissions == [4, 6, 4]  # what was taken away stays so


def test_a_new_master_brings_its_topics_whatever_the_version() -> None:
    """Java compares the version with the one that the same address had as a slave, and may keep the old queues."""
    tables = new_tables()
    tables.register(registration(0, "a:1", version=5, queues=4), "la", 0)
    tables.register(registration(1, "b:1", version=5, queues=8), "lb", 0)

    tables.register(registration(0, "b:1", version=5, queues=8), "lb", 0)

    assert (addresses(tables), queues_of(tables)) == ({0: "b:1"}, {"g": 8})


def test_a_deposed_leader_does_not_take_the_masters_place_back() -> None:
    """It has not noticed yet, and registers every half minute; in Java it gets the route until the other's turn."""
    tables = new_tables()
    tables.register(registration(0, "a:1", term=5), "la", 0)
    tables.register(registration(0, "b:1", term=6, version=2, queues=8), "lb", 10)

    assert tables.register(registration(0, "a:1", term=5, version=3, queues=1), "la", 20) == (False, "b:1", "ha-b:1")
    assert (addresses(tables), queues_of(tables)) == ({0: "b:1"}, {"g": 8})

    assert tables.register(registration(1, "a:1", term=6, version=3), "la", 30) == (True, "b:1", "ha-b:1")
    assert addresses(tables) == {0: "b:1", 1: "a:1"}


def test_a_former_leader_that_is_a_slave_moves_from_the_masters_place() -> None:
    """Whether another leader has come already or not."""
    tables = new_tables()
    tables.register(registration(0, "a:1", term=5), "la", 0)

    tables.register(registration(1, "a:1", term=5), "la", 0)

    assert addresses(tables) == {1: "a:1"}
    assert queues_of(tables) == {"g": 4}


def test_what_a_leader_said_as_a_slave_does_not_take_its_own_place_when_it_comes_late() -> None:
    """Registrations may overtake each other on different connections."""
    tables = new_tables()
    tables.register(registration(0, "a:1", term=6), "la", 0)

    assert not tables.register(registration(1, "a:1", term=5), "old", 0).is_taken

    assert addresses(tables) == {0: "a:1"}


def test_one_term_has_one_master() -> None:
    """Two groups with one name, or one that was copied: the first keeps the place while it lives."""
    tables = new_tables()
    tables.register(registration(0, "a:1", term=5), "la", 0)

    assert not tables.register(registration(0, "b:1", term=5), "lb", 0).is_taken
    assert tables.register(registration(0, "a:1", term=5), "la", 0).is_taken
    tables.closed("la")
    assert tables.register(registration(0, "b:1", term=5), "lb", 0).is_taken


def test_javas_brokers_say_no_term_and_take_the_place() -> None:
    """RocketMQ's rule, and the way back to it."""
    tables = new_tables()
    tables.register(registration(0, "a:1"), "la", 0)
    tables.register(registration(0, "b:1"), "lb", 0)
    assert addresses(tables) == {0: "b:1"}

    tables.register(registration(0, "c:1", term=9), "lc", 0)
    tables.register(registration(0, "a:1"), "la", 0)

    assert addresses(tables) == {0: "a:1"}
    assert tables.term_of("g", 0) is None


def test_the_term_of_a_rebuilt_group_begins_again_once_the_old_one_is_gone() -> None:
    """Whether its addresses are dropped, or its members took over the places of slaves meanwhile."""
    tables = new_tables()
    tables.register(registration(0, "a:1", term=50), "la", 0)
    tables.closed("la")
    assert tables.register(registration(0, "a:1", term=1), "new", 1).is_taken

    tables.register(registration(0, "a:1", term=50), "la", 2)
    tables.register(registration(1, "b:1", term=1), "lb", SILENCE_MS)
    assert not tables.register(registration(0, "c:1", term=1), "lc", SILENCE_MS + 2).is_taken
    assert tables.register(registration(0, "c:1", term=1), "lc", SILENCE_MS + 3).is_taken
    assert addresses(tables) == {0: "c:1", 1: "b:1"}


def test_a_master_that_only_asks_for_its_version_keeps_its_term() -> None:
    """With forceRegister=false a broker asks first, and registers only if it must."""
    tables = new_tables()
    tables.register(registration(0, "a:1", term=5), "la", 0)

    assert tables.renew("a:1", DataVersion(1, 7), SILENCE_MS) == (False, DataVersion(1, 7))

    assert tables.expire(SILENCE_MS + 1) == ()
    assert tables.term_of("g", 2 * SILENCE_MS) == 5
    assert tables.renew("a:1", DataVersion(2, 7), 3 * SILENCE_MS) == (True, DataVersion(1, 7))
    assert tables.renew("x:1", DataVersion(2, 7), 0) == (True, None)
    assert tables.expire(2 * SILENCE_MS + 1) == (("a:1", "la"),)


def test_unregistering_takes_nobody_elses_place() -> None:
    """In Java a leader that stops removes id 0, which is its successor by then (rocketmq 5374)."""
    tables = new_tables()
    tables.register(registration(0, "a:1"), "la", 0)
    tables.register(registration(0, "b:1"), "lb", 0)

    assert not tables.unregister("g", 0, "a:1")
    assert addresses(tables) == {0: "b:1"}
    assert not tables.unregister("g", 1, "b:1")
    assert not tables.unregister("h", 0, "b:1")
    assert addresses(tables) == {0: "b:1"}
    assert tables.unregister("g", 0, "b:1")
    assert (tables.brokers(), tables.topics(), tables.sizes()) == ((), (), (0, 0, 0, 0))


def test_a_connection_that_ends_takes_what_came_over_it_last() -> None:
    """A broker that has connected anew is not dropped by the end of its old connection."""
    tables = new_tables()
    tables.register(registration(0, "a:1"), "old", 0)
    tables.register(registration(0, "x:1", name="h"), "old", 0)
    tables.register(registration(0, "a:1"), "new", 0)

    assert tables.closed("old") == ("x:1",)
    assert tables.closed("old") == ()

    assert [one.broker_name for one in tables.brokers()] == ["g"]
    assert queues_of(tables) == {"g": 4}


def test_silent_addresses_are_dropped_and_the_last_one_takes_the_topics_along() -> None:
    """After 120 s; whoever registers in time stays."""
    tables = new_tables()
    tables.register(registration(0, "a:1"), "la", 0)
    tables.register(registration(1, "b:1"), "lb", 1)

    assert tables.expire(SILENCE_MS) == ()
    assert tables.expire(SILENCE_MS + 1) == (("a:1", "la"),)
    assert (addresses(tables), queues_of(tables)) == ({1: "b:1"}, {"g": 4})
    assert tables.expire(SILENCE_MS + 2) == (("b:1", "lb"),)
    assert tables.route("T") is None


def test_a_renamed_broker_leaves_its_old_name() -> None:
    """An address has one place; in Java the old name keeps it for ever."""
    tables = new_tables()
    tables.register(registration(0, "a:1", name="old"), "la", 0)

    tables.register(registration(0, "a:1", name="new", cluster="d"), "la", 0)

    assert [(one.cluster, one.broker_name) for one in tables.brokers()] == [("d", "new")]
    assert queues_of(tables) == {"new": 4}


def test_a_group_that_gets_another_cluster_moves_with_its_master() -> None:
    """A rolling restart with a new brokerClusterName."""
    tables = new_tables()
    tables.register(registration(0, "a:1"), "la", 0)
    tables.register(registration(1, "b:1", cluster="d"), "lb", 0)
    assert tables.brokers()[0].cluster == "c"

    tables.register(registration(0, "b:1", cluster="d"), "lb", 0)

    assert tables.brokers()[0].cluster == "d"


def test_write_permission_is_wiped_until_a_changed_registration() -> None:
    """And given back without touching what else the permission says."""
    tables = new_tables()
    topics = {"T": QueueData("g", 1, 1, 7), "U": QueueData("g", 1, 1, 4)}
    one = BrokerRegistration("c", "g", 0, "a:1", "h:1", DataVersion(1), topics)
    tables.register(one, "la", 0)

    def permissions() -> list[int]:
        return [route.queue_datas[0].perm for topic in ("T", "U") if (route := tables.route(topic))]

    assert tables.wipe_write("g") == 2
    assert permissions() == [5, 4]
    tables.register(one, "la", 0)
    assert permissions() == [5, 4]
    assert tables.add_write("g") == 2
    assert permissions() == [7, 6]
    tables.register(BrokerRegistration("c", "g", 0, "a:1", "h:1", DataVersion(2), topics), "la", 0)
    assert permissions() == [7, 4]
    assert (tables.wipe_write("h"), tables.add_write("h")) == (0, 0)


def test_a_deleted_topic_is_gone_everywhere_or_in_one_cluster() -> None:
    """216 without a cluster removes all."""
    tables = new_tables()
    tables.register(registration(0, "a:1", name="g", cluster="c"), "la", 0)
    tables.register(registration(0, "b:1", name="h", cluster="d"), "lb", 0)

    tables.delete_topic("T", "c")
    assert queues_of(tables) == {"h": 4}
    tables.delete_topic("T")
    tables.delete_topic("T")
    assert tables.route("T") is None
    assert tables.sizes() == (2, 2, 0, 0)


def test_topics_are_told_apart_by_their_system_flag() -> None:
    """RocketMQ's units: bit 0 a topic of a unit, bit 1 a subscription of one."""
    tables = new_tables()
    flags = {"none": 0, "unit": SYS_FLAG_UNIT, "sub": SYS_FLAG_UNIT_SUB, "both": SYS_FLAG_UNIT | SYS_FLAG_UNIT_SUB}
    topics = {topic: QueueData("g", 1, 1, 6, flag) for topic, flag in flags.items()}
    tables.register(BrokerRegistration("c", "g", 0, "a:1", "h:1", DataVersion(), topics), "la", 0)

    assert tables.topics_with(SYS_FLAG_UNIT) == ("both", "unit")
    assert tables.topics_with(SYS_FLAG_UNIT_SUB) == ("both", "sub")
    assert tables.topics_with(SYS_FLAG_UNIT_SUB, without=SYS_FLAG_UNIT) == ("sub",)


@pytest.mark.parametrize(
    ("limits", "refused", "what"),
    [
        (TableLimits(1, 9, 9, 9), registration(0, "x:1", name="h"), "brokersMax"),
        (TableLimits(9, 2, 9, 9), registration(2, "x:1"), "addressesMax"),
        (TableLimits(9, 9, 1, 9), registration(0, "a:1", version=2, topics=("U",)), "topicsMax"),
        (TableLimits(9, 9, 9, 1), registration(0, "x:1", name="h"), "placesMax"),
    ],
)
def test_what_is_too_much_is_refused_and_changes_nothing(
    limits: TableLimits, refused: BrokerRegistration, what: str
) -> None:
    """With the name of the setting; whoever is known can go on registering."""
    tables = new_tables(limits)
    tables.register(registration(0, "a:1", name="g"), "la", 0)
    if limits.addresses_max == 2:
        tables.register(registration(1, "b:1", name="g"), "lb", 0)
    before = (tables.brokers(), tables.topics(), tables.sizes())

    with pytest.raises(RequestError, match=what):
        tables.register(refused, "lx", 1)

    assert (tables.brokers(), tables.topics(), tables.sizes()) == before
    assert tables.register(registration(0, "a:1", name="g"), "la", 2).is_taken


def test_a_broker_with_too_many_topics_stays_known() -> None:
    """Its topics so far are not dropped after two minutes because of one more."""
    tables = new_tables(TableLimits(9, 9, 1, 9))
    tables.register(registration(0, "a:1"), "la", 0)

    with pytest.raises(RequestError):
        tables.register(registration(0, "a:1", version=2, topics=("T", "U")), "la", SILENCE_MS)

    assert tables.expire(SILENCE_MS + 1) == ()
    assert queues_of(tables) == {"g": 4}


@pytest.mark.parametrize("what", ["brokersMax", "addressesMax", "topicsMax", "placesMax"])
def test_one_host_takes_a_share_of_each_limit_only(what: str) -> None:
    """Whoever connects from elsewhere still registers; and when the first one leaves, all its room is free again."""
    limits = replace(TableLimits(100, 100, 100, 100, 25), **{f"{what.removesuffix('Max')}_max": 20})
    tables = new_tables(limits)

    def take(host: str, number: int) -> None:
        one = {
            "brokersMax": registration(0, f"{host}:{number}", name=f"{host}{number}", topics=()),
            "addressesMax": registration(number, f"{host}:{number}", name=host, topics=()),
            "topicsMax": registration(0, f"{host}:{number}", name=f"{host}{number}", topics=(f"{host}{number}",)),
            "placesMax": registration(0, f"{host}:{number}", name=f"{host}{number}", topics=("T",)),
        }[what]
        tables.register(one, (host, number), 0, host)

    for host in ("one", "two", "one"):
        for number in range(1, 6):
            take(host, number)
        with pytest.raises(RequestError, match=rf"from {host}: this name server takes at most 5.*{what}=20"):
            take(host, 6)
        if host == "two":
            for number in range(1, 6):
                assert tables.closed(("one", number))


def test_a_brokers_topics_are_its_own_hosts_from_wherever_they_are_registered() -> None:
    """Its host has no more room because others register under the broker's name."""
    tables = new_tables(TableLimits(100, 100, 100, 20, 25))
    tables.register(registration(0, "a:1", topics=("1", "2", "3", "4")), "la", 0, "one")

    tables.register(registration(0, "b:1", version=2, topics=("1", "2", "3", "4", "5")), "lb", 0, "two")
    with pytest.raises(RequestError, match=r"takes at most 5.*placesMax=20"):
        tables.register(registration(0, "c:1", version=3, topics=("6",)), "lc", 0, "three")

    assert tables.topics() == ("1", "2", "3", "4", "5")


def test_limits_are_those_of_what_is_there_now() -> None:
    """What has gone makes room."""
    tables = new_tables(LIMITS)
    for number in range(100):
        topics = tuple(f"t{number}-{one}" for one in range(LIMITS.topics_max))
        tables.register(registration(0, f"a:{number + 1}", name=f"g{number}", topics=topics), number, 0)
        tables.closed(number)

    assert tables.sizes() == (0, 0, 0, 0)
