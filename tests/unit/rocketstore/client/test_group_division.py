"""Members of a group divide the queues of two brokers that they find through a name server."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dledger.client.shared import Deadline
from dledger.errors import ConfigError, InvalidRequestError
from rocketstore.client.errors import NotFoundError
from rocketstore.client.group_consumer import GroupConsumer
from rocketstore.client.group_division import Division
from rocketstore.client.group_places import KnownToNameServers
from rocketstore.client.shares import GroupDelivery
from rocketstore.nameserver.errors import NameServerError
from rocketstore.nameserver.groups import TopicShare
from rocketstore.state.changes import TopicConfig
from rocketstore.types import BrokerRole, PutMessageStatus, PutResult
from tests.support.waiting import wait_until
from tests.unit.rocketstore.client.cluster_members import GROUP, RETRIES, TOPIC, Known, queue, queues_of, two_brokers

ALL = ["a0", "a1", "b0", "b1"]


@pytest.fixture
def known(tmp_path: Path) -> Iterator[Known]:
    with two_brokers(tmp_path) as found:
        yield found


@pytest.fixture
def quick_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routes are looked up all the time."""
    for name in ("REFRESH_S", "DOUBTED_REFRESH_S", "UNKNOWN_REFRESH_S"):
        monkeypatch.setattr(f"rocketstore.client.routes.{name}", 0.05)
    monkeypatch.setattr("rocketstore.client.group_division.LOOK_S", 0.05)
    monkeypatch.setattr("rocketstore.client.group_division.MISSING_TOPIC_S", 0.05)


class Seen:
    """A handler that remembers."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def __call__(self, delivery: GroupDelivery) -> None:
        self.bodies.append(delivery.body)


def receive_and_ack(one: GroupConsumer, count: int) -> None:
    """The next messages."""
    for _ in range(count):
        delivery = one.receive(15.0)
        assert delivery is not None
        one.ack(delivery)


def branches(one: GroupConsumer) -> list[str]:
    """The brokers that it is a member at."""
    assert one._division is not None
    return sorted(each.name for each in one._division.branches())


def test_members_divide_the_queues_of_all_brokers(known: Known) -> None:
    """In one list, by broker and number; what is done is committed at the broker that has it."""
    first, second = Seen(), Seen()
    with known.member(first) as one:
        assert queues_of(one) == ALL
        with known.member(second) as two:
            wait_until(lambda: sorted([queues_of(one), queues_of(two)]) == [ALL[:2], ALL[2:]], "they share")
            known.put("a", b"a0", b"a1")
            known.put("b", b"b0", queue_id=1)
            wait_until(lambda: len(first.bodies + second.bodies) == 3, "all came")
            assert sorted([sorted(first.bodies), sorted(second.bodies)]) == [[b"a0", b"a1"], [b"b0"]]
            wait_until(lambda: known.committed("a") == {0: 2, 1: 0}, "committed at a")
            wait_until(lambda: known.committed("b") == {0: 0, 1: 1}, "committed at b")
        wait_until(lambda: queues_of(one) == ALL, "it takes over")


def test_queues_are_shared_with_rocketmqs_clients(known: Known) -> None:
    """Each takes its run of the whole list, by the order of the ids; all again once the other has left everywhere."""
    with known.member() as one, known.a.dial() as at_a, known.b.dial() as at_b:
        for java in (at_a, at_b):
            java.subscribe("g", TOPIC, client_id="!first")
        wait_until(lambda: queues_of(one) == ["b0", "b1"], "the second half is ours")
        for java in (at_a, at_b):
            java.subscribe("g", TOPIC, client_id="~last")
        wait_until(lambda: queues_of(one) == ["a0", "a1"], "the first half is")
        at_a.socket.close()
        at_b.socket.close()
        wait_until(lambda: queues_of(one) == ALL, "all are")


def test_who_is_a_member_at_one_broker_is_one(known: Known) -> None:
    """The other has just started: RocketMQ's clients connect within 30 s, and keep their queues meanwhile."""
    with known.member() as one, known.a.dial() as java:
        java.subscribe("g", TOPIC, client_id="!first")
        wait_until(lambda: queues_of(one) == ["b0", "b1"], "it counts for all queues")


def test_brokers_without_a_master_hold_up_only_their_own_queues(known: Known) -> None:
    """The others are divided anew, consumed and committed meanwhile."""
    first, second = Seen(), Seen()
    with known.member(first, timeout_s=30.0) as one:
        known.b.become(BrokerRole.SLAVE)
        known.put("a", b"1")
        wait_until(lambda: known.committed("a") == {0: 1, 1: 0}, "a's messages are consumed and committed")
        two = known.unstarted(timeout_s=30.0)
        starting = threading.Thread(target=two.start, args=(second,))
        starting.start()
        halves = [ALL[:2], []]
        wait_until(lambda: sorted([queues_of(one)[:2], queues_of(two)]) == sorted(halves), "a's have one owner")
        known.put("a", b"2", queue_id=1)
        wait_until(lambda: len(first.bodies + second.bodies) == 2, "a's messages come")
        known.b.become(BrokerRole.SYNC_MASTER)
        wait_until(lambda: sorted([queues_of(one), queues_of(two)]) == [ALL[:2], ALL[2:]], "b's have one, too")
        starting.join()
        known.put("b", b"3")
        wait_until(lambda: known.committed("b").get(0) == 1, "and are consumed")
        two.close()


def test_a_member_starts_without_brokers_that_are_down(
    known: Known, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it has waited for them long enough. Its queues there are of unknown lag, and follow."""
    waited = threading.Event()

    class Told(Deadline):
        expired = property(lambda _: waited.is_set())  # instead of the clock's

    monkeypatch.setattr("rocketstore.client.group_division.Deadline", Told)
    known.b.become(BrokerRole.SLAVE)
    seen = Seen()
    with ThreadPoolExecutor(1) as pool, known.unstarted(timeout_s=3.0) as one:
        starting = pool.submit(one.start, seen)
        wait_until(lambda: queues_of(one) == ["a0", "a1"], "it has the others' queues")
        waited.set()
        starting.result(30)
        assert {one.lag()[queue("b0")], one.lag()[queue("b1")]} == {-1}
        known.b.become(BrokerRole.SYNC_MASTER)
        wait_until(lambda: queues_of(one) == ALL, "they follow")
        known.put("b", b"1")
        wait_until(lambda: seen.bodies == [b"1"], "and are consumed")
    assert "begins there with the first message" in caplog.text


def test_closing_waits_for_all_brokers_at_once_and_says_what_failed(known: Known) -> None:
    """What is done at the others is committed."""
    known.put("a", b"1")
    known.put("b", b"2")
    one = known.member(commit_s=60.0)
    receive_and_ack(one, 2)
    known.b.state.refusal = PutResult(PutMessageStatus.MESSAGE_ILLEGAL, reason="the test refuses it")
    with pytest.raises(InvalidRequestError, match="the test refuses it"):
        one.commit()
    assert (known.committed("a")[0], known.committed("b")[0]) == (1, 0)

    known.put("a", b"3")
    receive_and_ack(one, 1)
    states = known.a.state, known.b.state
    held: list[list[Callable[[], None]]] = [[], []]
    for state, kept in zip(states, held, strict=True):
        state.held = kept
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(one.close)
        wait_until(lambda: all(held), "both have the last commit, and neither has answered")
        for state, kept in zip(states, held, strict=True):
            state.held = None
            for answer in kept:
                answer()
        with pytest.raises(InvalidRequestError, match="the test refuses it"):
            closing.result(30)
    assert (known.committed("a")[0], known.committed("b")[0]) == (2, 0)
    one.close()


@pytest.mark.usefixtures("quick_routes")
def test_a_topic_that_comes_to_further_brokers_is_read_there_from_its_first_message(known: Known) -> None:
    """Whatever ``start`` says: messages may come before any member looks. Also if the member itself is new."""
    known.forget("b")
    known.put("a", b"old")
    seen, later = Seen(), Seen()
    with known.member(seen, start="last") as one:
        assert queues_of(one) == ALL[:2]
        known.put("b", b"new")
        known.register("b")
        wait_until(lambda: seen.bodies == [b"new"], "from the first")
        wait_until(lambda: queues_of(one) == ALL, "it has all of them")
    known.b.state.committed.clear()
    with known.member(later, start="last"):
        wait_until(lambda: later.bodies == [b"new"], "the group has begun at a, so it is not new")


def test_a_new_group_begins_everywhere_where_it_was_told_to(known: Known) -> None:
    """Its beginning is stored at each broker before the member has started."""
    known.put("a", b"old")
    known.put("b", b"old", b"old", queue_id=1)
    with known.member(start="last"):
        assert (known.committed("a"), known.committed("b")) == ({0: 1, 1: 0}, {0: 0, 1: 2})


@pytest.mark.usefixtures("quick_routes")
def test_a_route_that_flaps_moves_no_queue(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that has just started knows some brokers, or none; those that answer keep their queues."""
    seen, divide = Seen(), Division._divide
    forgotten: list[set[str]] = []

    def divide_and_tell(division: Division) -> None:
        divide(division)
        assert isinstance(division._places, KnownToNameServers)
        forgotten.append(set(division._places._routes.missing(TOPIC)))

    monkeypatch.setattr(Division, "_divide", divide_and_tell)
    with known.member(seen) as one:
        before = {name: id(each) for name, each in one._shares.queues.items()}
        known.forget("b")
        wait_until(lambda: forgotten[-2:] == [{"b"}, {"b"}], "the queues were divided in the knowledge of that")
        known.put("b", b"1")
        wait_until(lambda: seen.bodies == [b"1"], "it is consumed without a route")
        known.forget("a")
        wait_until(lambda: forgotten[-2:] == [{"a", "b"}, {"a", "b"}], "and in the knowledge of that")
        known.put("a", b"2")
        wait_until(lambda: seen.bodies == [b"1", b"2"], "and without any")
        known.register("a", "b")
        known.put("b", b"3")
        wait_until(lambda: len(seen.bodies) == 3, "it goes on")
        assert {name: id(each) for name, each in one._shares.queues.items()} == before


@pytest.mark.usefixtures("quick_routes")
def test_brokers_that_are_gone_are_left(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they neither answer nor have a route; the others' queues are divided without them."""
    monkeypatch.setattr("rocketstore.client.group_division.RETIRE_S", 0.2)
    with known.member() as one:
        assert one._division is not None
        one._division._branches["b"]._connection.timeout_s = 0.5  # so as not to wait for it long
        known.b.stop()
        known.callers["b"].socket.close()
        wait_until(lambda: queues_of(one) == ALL[:2], "its queues are gone")
        wait_until(lambda: branches(one) == ["a"], "so is what was kept for it")
        known.put("a", b"1")
        assert one.receive(15.0) is not None


@pytest.mark.usefixtures("quick_routes")
def test_a_queue_of_brokers_that_are_left_stays_locked_while_its_message_is_handled(
    known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes: in order, the next member must not begin before. Its other queues are free at once."""
    monkeypatch.setattr("rocketstore.client.group_division.RETIRE_S", 0.0)
    find, is_gone = Division._find, threading.Event()

    def found(self: Division, topics: Iterable[str]) -> dict[str, tuple[TopicShare, ...]]:
        places = find(self, topics)
        if not is_gone.is_set():
            return places
        return {topic: tuple(one for one in shares if one.group.name != "b") for topic, shares in places.items()}

    def lockable() -> list[int]:
        queues = tuple((TOPIC, queue_id) for queue_id in range(2))

        async def lock() -> list[int]:
            return sorted(queue_id for _, queue_id in known.b.groups._locks.lock(GROUP, "java", queues))

        return known.b.bridge.run(lock())

    monkeypatch.setattr(Division, "_find", found)
    known.put("b", b"1")
    with known.member(ordered=True) as one:
        delivery = one.receive(15.0)
        assert delivery is not None
        is_gone.set()
        wait_until(lambda: branches(one) == ["a"], "the broker is left")
        wait_until(lambda: lockable() != [], "something is free")
        assert lockable() == [1]
        one.ack(delivery)
        wait_until(lambda: lockable() == [0, 1], "so is its queue")
        assert known.committed("b")[0] == 1


@pytest.mark.usefixtures("quick_routes")
def test_a_topic_grows_at_one_broker(known: Known) -> None:
    """All its queues are divided anew."""
    with known.member() as one:
        known.b.state.table[TOPIC] = TopicConfig(TOPIC, 3, 3)
        known.register("b", queues=3)
        wait_until(lambda: queues_of(one) == [*ALL, "b2"], "the new queue is consumed, too")


def test_a_route_with_more_queues_than_there_are_holds_up_none(known: Known) -> None:
    """They were removed a moment ago."""
    known.register("b", queues=3)
    with known.member() as one:
        assert queues_of(one) == ALL


def test_a_failed_message_goes_back_to_its_broker(known: Known) -> None:
    """As a retry there; its copy has the same number of tries wherever it is read."""
    known.put("b", b"x")
    with known.member() as one:
        assert {(each.topic, each.broker_name) for each in one.queues} >= {(RETRIES, "a"), (RETRIES, "b")}
        delivery = one.receive(15.0)
        assert delivery is not None
        one.send_back(delivery)
        assert len(known.b.store.log.records) == 2
        assert not known.a.store.log.records


def test_in_order_each_broker_locks_its_own_queues(known: Known) -> None:
    """So no two members have messages of one queue at once."""
    known.put("a", b"a", b"a")
    known.put("b", b"b", b"b")
    with known.member(ordered=True) as one:
        held = [one.receive(15.0), one.receive(15.0)]
        assert one.receive(0.2) is None
        with known.member(ordered=True) as two:
            wait_until(lambda: len(queues_of(one)) == 2, "it gave half of them up")
            assert two.receive(0.3) is None
            for each in held:
                assert each is not None
                one.ack(each)
            wait_until(lambda: sorted(queues_of(one) + queues_of(two)) == ALL, "each has an owner")
            got = [one.receive(15.0), two.receive(15.0)]
            assert sorted(each.body for each in got if each is not None) == [b"a", b"b"]


def test_a_broadcast_remembers_queues_of_the_same_number_at_two_brokers(known: Known, tmp_path: Path) -> None:
    """In its file."""
    file = tmp_path / "offsets.json"
    known.put("a", b"1")
    known.put("b", b"2", b"3")
    seen = Seen()
    with known.member(seen, broadcast=True, offsets_file=file):
        wait_until(lambda: len(seen.bodies) == 3, "all came")
    known.put("b", b"4")
    with known.member(seen, broadcast=True, offsets_file=file):
        wait_until(lambda: len(seen.bodies) == 4, "it goes on where it was")
    assert Counter(seen.bodies) == Counter([b"1", b"2", b"3", b"4"])


@pytest.mark.usefixtures("quick_routes")
def test_brokers_that_must_not_be_connected_to_hold_up_no_others(
    known: Known, caplog: pytest.LogCaptureFixture
) -> None:
    """Their address needs TLS. A member that starts says so."""
    with known.member() as one:
        known.callers["b"].register(0, "192.0.2.1:1", name="c", topics=(TOPIC,), queues=2)
        known.register("b", queues=1)
        wait_until(lambda: queues_of(one) == ALL[:3], "the others' queues are divided anew")
        assert "cannot connect to c: plaintext is for loopback" in caplog.text
        with known.unstarted() as two, pytest.raises(ConfigError, match="plaintext"):
            two.start()


def test_what_cannot_work_is_said_at_the_start(known: Known) -> None:
    """No topic, brokers given twice or not at all, no name server."""
    with pytest.raises(ConfigError, match="either name_servers"):
        GroupConsumer(group="g")
    with pytest.raises(ConfigError, match="either name_servers"):
        GroupConsumer("127.0.0.1:1", name_servers="127.0.0.1:2", group="g")
    one = known.unstarted()
    one.subscribe("nowhere")
    with one, pytest.raises(NotFoundError, match="no name server has a route"):
        one.start()
    known.server.stop()
    with known.unstarted(timeout_s=0.5) as two, pytest.raises(NameServerError):
        two.start()
