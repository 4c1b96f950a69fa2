"""``ClusterProducer`` against two groups of fake brokers behind a real name server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dledger.errors import ConfigError, DLedgerError, InvalidRequestError, TlsError, UnavailableError
from rocketstore.client.cluster_producer import ClusterProducer
from rocketstore.client.errors import MessageRefusedError, NotFoundError, PartlySentError, SendOutcomeUnknownError
from rocketstore.client.outgoing import queue_of_key
from rocketstore.message.message import Message
from rocketstore.nameserver.errors import NameServerError
from tests.support.fake_broker import Break, Refusal, fake_brokers
from tests.unit.rocketstore.client.cluster_known import TOPIC, TwoGroups, two_groups

NOWHERE = "127.0.0.1:1"


@pytest.fixture
def known(tmp_path: Path) -> Iterator[TwoGroups]:
    with two_groups(tmp_path) as found:
        yield found


def letter(number: int) -> Message:
    return Message(TOPIC, b"%04d" % number)


def test_messages_go_to_all_queues_of_all_groups(known: TwoGroups) -> None:
    """In turn, so that a group with more queues gets more."""
    with ClusterProducer(known.server) as producer:
        for number in range(30):
            producer.send(letter(number))

    assert (len(known.a.bodies(TOPIC)), len(known.b.bodies(TOPIC))) == (20, 10)
    assert known.bodies() == [b"%04d" % number for number in range(30)]


def test_a_key_keeps_its_queue(known: TwoGroups) -> None:
    """In order, also in a pipeline."""
    with ClusterProducer(known.server) as producer, producer.sender(ordered=True) as sender:
        futures = [sender.send(letter(number), key=str(number % 7)) for number in range(70)]
        sender.flush()
        assert all(future.done() for future in futures)
        assert sender.failed_messages == 0

    queues = [known.a.bodies(TOPIC, 0), known.a.bodies(TOPIC, 1), known.b.bodies(TOPIC, 0)]
    assert [sorted(bodies) for bodies in queues] == queues
    places = Counter(int(body) % 7 for bodies in queues for body in {b"%d" % (int(one) % 7) for one in bodies})
    assert set(places.values()) == {1}
    assert all(queues[:2]) or queues[2]


def test_a_pipeline_uses_all_groups(known: TwoGroups) -> None:
    """Each through its own stream; closing waits for everything."""
    with ClusterProducer(known.server) as producer:
        sender = producer.sender()
        futures = [sender.send(letter(number)) for number in range(60)]
        producer.close()
        assert [future.result().queue_offset >= 0 for future in futures] == [True] * 60
        with pytest.raises(UnavailableError):
            sender.send(letter(0))
        with pytest.raises(UnavailableError):
            producer.send(letter(0))
        with pytest.raises(UnavailableError):
            producer.sender()

    assert (len(known.a.bodies(TOPIC)), len(known.b.bodies(TOPIC))) == (40, 20)


def test_many_together_go_to_one_group(known: TwoGroups) -> None:
    """In few requests; the next call goes to the next group. Each topic by itself."""
    known.a.add_topic("bills", 1)
    known.caller.register(0, known.a.addresses[0], name="a", topics=(TOPIC, "bills"), queues=2, version=2)
    with ClusterProducer(known.server) as producer:
        for _ in range(3):
            receipts = producer.send_many([letter(1), Message("bills", b"x"), letter(2)])
            assert [one.topic for one in receipts] == [TOPIC, "bills", TOPIC]
        assert producer.send_many([]) == []

    assert (len(known.a.bodies(TOPIC)), len(known.b.bodies(TOPIC)), len(known.a.bodies("bills"))) == (4, 2, 3)


def test_a_dead_group_is_passed_over(known: TwoGroups) -> None:
    """What certainly was not stored goes to another group, and later messages go there at once."""
    seen: list[str] = []
    known.a.stop()
    with ClusterProducer(known.server, timeout_s=3, on_failure=lambda address, _: seen.append(address)) as producer:
        for number in range(12):
            producer.send(letter(number))
        pipelined = producer.sender()
        assert pipelined.send(letter(12)).result().queue_id == 0

    assert known.b.bodies(TOPIC) == [b"%04d" % number for number in range(13)]
    assert set(seen) <= {known.a.addresses[0]}


def test_brokers_that_only_rocketmqs_clients_can_speak_to_are_passed_over(known: TwoGroups) -> None:
    """They may have the topic, too; here the name server stands for one: it does not speak gRPC either."""
    known.caller.register(0, known.server, name="c", topics=(TOPIC,), queues=4)
    with ClusterProducer(known.server, timeout_s=3) as producer:
        for number in range(12):
            producer.send(letter(number))
        with producer.sender() as sender:
            futures = [sender.send(letter(number)) for number in range(12, 18)]
        assert all(one.result().queue_offset >= 0 for one in futures)
        with pytest.raises(TlsError, match="RocketMQ's own"):
            producer.send(letter(18), queue_id=0, broker_name="c")

    assert known.bodies() == [b"%04d" % number for number in range(18)]


def test_a_key_waits_for_its_group(known: TwoGroups) -> None:
    """Elsewhere its order would be lost: the error comes from its own group."""
    known.a.stop()
    of_a, of_b = (next(key for key in map(str, range(99)) if queue_of_key(key, 3) == queue) for queue in (0, 2))
    with ClusterProducer(known.server, timeout_s=2) as producer:
        producer.send(letter(1), key=of_b)
        with pytest.raises(UnavailableError):
            producer.send(letter(2), key=of_a)

    assert known.b.bodies(TOPIC) == [b"0001"]


def test_what_may_be_stored_is_not_sent_elsewhere(known: TwoGroups) -> None:
    """Nor what no group would take."""
    for group in (known.a, known.b):
        group.nodes[0].sends.append(Break(stored=True))
    with ClusterProducer(known.server, enable_idempotence=False) as producer, pytest.raises(SendOutcomeUnknownError):
        producer.send(letter(1))
    assert len(known.bodies()) == 1
    for group in (known.a, known.b):
        group.nodes[0].sends.clear()
        group.nodes[0].sends.append(Refusal("MESSAGE_ILLEGAL"))
    with ClusterProducer(known.server) as producer, pytest.raises(MessageRefusedError):
        producer.send(letter(2))
    assert len(known.bodies()) == 1


def test_groups_are_tried_a_few_times(known: TwoGroups) -> None:
    """The last error is raised when no group takes the message."""
    known.a.stop()
    known.b.stop()
    with ClusterProducer(known.server, timeout_s=0.3) as producer, pytest.raises(UnavailableError):
        producer.send(letter(1))


def test_partly_sent_messages_say_which(known: TwoGroups) -> None:
    """Results in the order of the call."""
    for group in (known.a, known.b):
        group.nodes[0].sends.append(Refusal("MESSAGE_ILLEGAL", only=(1,)))
    with (
        ClusterProducer(known.server, enable_idempotence=False) as producer,
        pytest.raises(PartlySentError) as caught,
    ):
        producer.send_many([letter(number) for number in range(3)])

    assert [isinstance(one, DLedgerError) for one in caught.value.results] == [False, True, False]


def test_a_queue_is_one_of_a_group(known: TwoGroups) -> None:
    """Its number alone says nothing."""
    with ClusterProducer(known.server) as producer:
        assert producer.send(letter(1), queue_id=1, broker_name="a").queue_id == 1
        assert producer.send(letter(2), broker_name="b").queue_id == 0
        for wrong in ({"queue_id": 0}, {"broker_name": "c"}):
            with pytest.raises(InvalidRequestError):
                producer.send(letter(3), **wrong)
        with pytest.raises(InvalidRequestError):
            producer.send(letter(3), key="k", broker_name="a")

    assert (known.a.bodies(TOPIC, 1), known.b.bodies(TOPIC)) == ([b"0001"], [b"0002"])


def test_one_group_can_be_chosen_for_numbers(known: TwoGroups) -> None:
    """Numbers count within a group."""
    with ClusterProducer(known.server) as producer:
        a = producer.at("a")
        with a.sender(producer_name="me") as sender:
            sender.send(letter(0), sequence=0).result()
        assert (a.next_sequence("me"), producer.at("b").next_sequence("me")) == (1, 0)
        with pytest.raises(NotFoundError):
            producer.at("c")


def test_unknown_topics(known: TwoGroups) -> None:
    """Sent to the groups that create topics, as RocketMQ's producer does; without such groups there is none."""
    with ClusterProducer(known.server) as producer:
        with pytest.raises(NotFoundError):
            producer.send(Message("new", b"x"))
        known.b.auto_create = 1
        known.caller.register(0, known.b.addresses[0], name="b", topics=(TOPIC, "TBW102"), queues=1, version=2)
    with ClusterProducer(known.server) as producer:
        producer.send(Message("new", b"x"))
        with pytest.raises(NotFoundError):
            producer.send(Message("other", b"x"), key="k")

    assert known.b.bodies("new") == [b"x"]


def test_brokers_that_moved_are_found(known: TwoGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    """All addresses of a group may change: the route is looked up soon after a failure."""
    monkeypatch.setattr("rocketstore.client.routes.DOUBTED_REFRESH_S", 0.1)
    with ClusterProducer(known.server, timeout_s=2) as producer:
        producer.send(letter(0), broker_name="b")
        known.b.stop()
        with fake_brokers(1) as elsewhere:
            elsewhere.add_topic(TOPIC, 1)
            known.caller.register(0, elsewhere.addresses[0], name="b", topics=(TOPIC,), queues=1, version=3)
            for number in range(15):
                try:
                    producer.send(letter(number), broker_name="b")
                except DLedgerError:
                    continue
                break

            assert elsewhere.bodies(TOPIC)


def test_a_restarted_name_server_changes_no_route(
    known: TwoGroups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows nothing until the brokers have registered again, one after the other: keys keep their queues."""
    monkeypatch.setattr("rocketstore.client.routes.REFRESH_S", 0.0)
    monkeypatch.setattr("rocketstore.client.routes.DOUBTED_REFRESH_S", 0.0)

    def places(producer: ClusterProducer) -> list[set[bytes]]:
        """Which messages are in which queue."""
        before = len(known.bodies())
        for number in range(20):
            producer.send(letter(number), key=str(number))
        assert len(known.bodies()) == before + 20
        return [set(known.a.bodies(TOPIC, 0)), set(known.a.bodies(TOPIC, 1)), set(known.b.bodies(TOPIC))]

    with ClusterProducer(known.server) as producer:
        first = places(producer)
        for name in ("a", "b", ""):
            assert places(producer) == first
            if name:
                known.leave(name)
        for name in ("b", "a"):
            known.join(name)
            assert places(producer) == first
        known.leave("a")
        monkeypatch.setattr("rocketstore.client.routes.MISSING_S", 0.0)
        before = known.a.bodies(TOPIC)
        for number in range(5):
            producer.send(letter(number))
        assert known.a.bodies(TOPIC) == before
        known.leave("b")
        with pytest.raises(NotFoundError):
            producer.send(letter(0))


def test_without_name_servers(known: TwoGroups) -> None:
    """A known route stays valid; otherwise there is an error, and plaintext stays on this machine."""
    with ClusterProducer([NOWHERE, known.server]) as producer:
        producer.send(letter(1))
    with ClusterProducer(NOWHERE) as producer:
        for _ in range(2):
            with pytest.raises(NameServerError):
                producer.send(letter(1))
    with pytest.raises(ConfigError, match="insecure"):
        ClusterProducer("10.0.0.1:9876")
    with pytest.raises(ConfigError):
        ClusterProducer([])
