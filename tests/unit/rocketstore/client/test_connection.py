"""Who is the master, when brokers disagree or fall silent."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from queue import SimpleQueue

import grpc
import pytest

from dledger.client.channels import CONNECTION_STREAMS_MAX
from dledger.client.discovery import Search
from dledger.client.shared import Deadline
from dledger.errors import RequestTimeoutError, UnavailableError
from rocketstore.client.aio.errors import BadAnswerError
from rocketstore.client.connection import BrokerConnection
from rocketstore.client.errors import BrokerBusyError, NotMasterError, StoreFailedError, hint_of
from rocketstore.client.methods import LIST_TOPICS, PUT_TOPIC, QUEUE_RANGE, STATUS
from rocketstore.pb import broker_pb2 as pb
from rocketstore.types import BrokerRole
from tests.support.fake_broker import FakeBrokers
from tests.support.waiting import wait_until


@pytest.fixture
def connection(brokers: FakeBrokers) -> Iterator[BrokerConnection]:
    made = BrokerConnection(brokers.addresses, timeout_s=0.5)
    yield made
    made.close()


def make_two_masters(brokers: FakeBrokers) -> tuple[str, str]:
    """The old one has not noticed yet; returns its address and the new one's."""
    brokers.elect(1)
    old = brokers.nodes[0]
    old.role, old.term = BrokerRole.SYNC_MASTER, 1
    return brokers.addresses[0], brokers.addresses[1]


def test_a_master_of_a_newer_term_is_noticed(brokers: FakeBrokers, connection: BrokerConnection) -> None:
    """Although the old one still answers as if nothing had happened."""
    old, new = make_two_masters(brokers)
    connection.directory.set_leader(old)

    connection.seeker.look()

    assert connection.directory.leader == new


def test_a_silent_master_does_not_hold_up_who_looks_for_another_one(brokers: FakeBrokers) -> None:
    """A majority says who leads: nobody waits for the answer of one that may be frozen."""
    brokers.elect(2)
    silent = brokers.nodes[0]
    silent.stop()
    with socket.create_server(("127.0.0.1", silent.port)), closing(BrokerConnection(brokers.addresses)) as connection:
        connection.directory.set_leader(silent.address)
        began = time.monotonic()

        connection.seeker.look(timeout_s=60)

        assert connection.directory.leader == brokers.addresses[2]
        assert time.monotonic() - began < 30


def test_a_silent_master_is_left_for_another_one(brokers: FakeBrokers, connection: BrokerConnection) -> None:
    """Long before the deadline, by those that may ask again: it may be frozen, and its successor answers."""
    frozen = brokers.nodes[0]
    frozen.gated = {"ListTopics", "Status"}
    frozen.gate.clear()
    brokers.elect(2)
    connection.directory.set_leader(frozen.address)
    deadline = connection.deadline(60.0)

    assert connection.ask_master(LIST_TOPICS, pb.ListTopicsRequest(), deadline, attempt_s=0.3).topics
    assert deadline.remaining_s > 20


@pytest.mark.parametrize("ask", ["ask_master", "ask_reader"])
def test_a_silent_master_does_not_get_the_whole_time(
    brokers: FakeBrokers, connection: BrokerConnection, ask: str
) -> None:
    """Whoever asks does not say how long one may take: half of the time is left for its successor."""
    frozen = brokers.nodes[0]
    frozen.gated = {"ListTopics", "Status"}
    frozen.gate.clear()
    brokers.elect(2)
    connection.directory.set_leader(frozen.address)

    assert getattr(connection, ask)(LIST_TOPICS, pb.ListTopicsRequest(), connection.deadline(10.0)).topics


def test_one_brokers_word_does_not_end_the_look_around(brokers: FakeBrokers, connection: BrokerConnection) -> None:
    """It may be the old master's: without a majority that agrees, all are heard."""
    _, new = make_two_masters(brokers)
    brokers.nodes[1].hint = False
    connection.directory.set_leader(new)

    for _ in range(10):
        connection.seeker.look()

        assert connection.directory.leader == new


def test_a_master_that_failed_is_not_believed_at_once(brokers: FakeBrokers, connection: BrokerConnection) -> None:
    """Its own word alone is not enough; a higher term is."""
    old, new = make_two_masters(brokers)
    connection.directory.set_leader(old)
    connection.directory.note_failure(old, UnavailableError("silent"))

    assert connection.seeker.leader(connection.deadline()) == new


def test_a_suspect_is_believed_if_nobody_knows_better(brokers: FakeBrokers, connection: BrokerConnection) -> None:
    """Its failure may have passed."""
    address = brokers.addresses[0]
    connection.directory.set_leader(address)
    connection.directory.note_failure(address, UnavailableError("for a moment"))

    assert connection.seeker.leader(connection.deadline()) == address


def test_an_old_master_alone_is_no_master(brokers: FakeBrokers, connection: BrokerConnection) -> None:
    """Others are in a newer term: wait for the one they elect. Meanwhile there is whom to read from."""
    old, _ = make_two_masters(brokers)
    brokers.nodes[1].role = BrokerRole.SLAVE
    connection.directory.set_leader(old)
    connection.directory.note_failure(old, UnavailableError("silent"))

    with pytest.raises(UnavailableError, match="no master"):
        connection.seeker.leader(connection.deadline())
    assert connection.seeker.reader(connection.deadline()) in brokers.addresses


def test_being_busy_is_no_reason_to_leave(connection: BrokerConnection, brokers: FakeBrokers) -> None:
    """Another broker could do nothing; a hint is followed."""
    first, second = brokers.addresses[:2]
    connection.directory.set_leader(first)

    connection.directory.note_failure(first, BrokerBusyError("busy"))
    assert connection.directory.leader == first
    connection.directory.note_failure(first, NotMasterError("moved", leader=hint_of(second)))
    assert connection.directory.leader == second


def test_nothing_is_sent_but_to_masters(connection: BrokerConnection, brokers: FakeBrokers) -> None:
    """So that nothing is sent where it would be refused; the error names who leads."""
    with pytest.raises(NotMasterError) as caught:
        connection.check_master(brokers.addresses[1], connection.deadline())

    assert caught.value.leader == hint_of(brokers.addresses[0])


def test_a_closed_connection_refuses_everything(connection: BrokerConnection, brokers: FakeBrokers) -> None:
    """With an error of ours, and looking for a master is quiet."""
    connection.close()
    connection.close()

    with pytest.raises(UnavailableError, match="closed"):
        connection.ask(STATUS, pb.StatusRequest(), brokers.addresses[0], connection.deadline())
    with pytest.raises(UnavailableError, match="closed"):
        connection.channels.open_stream("PullStream", brokers.addresses[0], iter(()))
    connection.seeker.look()


def test_many_streams_are_spread_over_connections(
    connection: BrokerConnection, brokers: FakeBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server takes so many calls of a connection (``connection_calls_max``); what is beyond waits without a word."""
    opened: list[str] = []
    maker = connection._maker
    open_ = maker.open

    def counted(address: str) -> grpc.Channel:
        opened.append(address)
        return open_(address)

    monkeypatch.setattr(maker, "open", counted)
    requests: list[SimpleQueue[bytes | None]] = [SimpleQueue() for _ in range(2 * CONNECTION_STREAMS_MAX + 1)]
    address = brokers.addresses[0]

    def stream(queue: SimpleQueue[bytes | None]) -> grpc.CallIterator[bytes]:
        return connection.channels.open_stream("PullStream", address, iter(queue.get, None))

    streams = [stream(queue) for queue in requests]
    assert len(opened) == 3
    for one in streams:
        one.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs
    wait_until(lambda: not any(connection.channels._streams.values()), "all have ended")
    stream(requests[0]).cancel()  # type: ignore[no-untyped-call]  # grpc-stubs
    assert len(opened) == 3
    for queue in requests:
        queue.put(None)


def test_no_answer_in_time_is_told_as_such(connection: BrokerConnection, brokers: FakeBrokers) -> None:
    """A server that holds a request back does not hold the caller."""
    request = pb.QueueRequest(topic="orders")

    with brokers.changed, pytest.raises(RequestTimeoutError):
        connection.ask(QUEUE_RANGE, request, brokers.addresses[0], connection.deadline(0.1))


def test_garbage_is_no_status(connection: BrokerConnection, brokers: FakeBrokers) -> None:
    """A typed error that names the broker."""
    brokers.nodes[2].garbled.add("Status")

    with pytest.raises(BadAnswerError, match="StatusResponse"):
        connection.ask(STATUS, pb.StatusRequest(), brokers.addresses[2], connection.deadline())
    assert connection.ask_master(LIST_TOPICS, pb.ListTopicsRequest(), connection.deadline()).topics


def test_brokers_are_found_where_they_answer(brokers: FakeBrokers) -> None:
    """From outside their network, where what they say of themselves cannot be resolved: also after a failover."""
    for node in brokers.nodes:
        node.advertised = f"{node.node_id}.invalid:10911"
    connection = BrokerConnection(brokers.addresses, timeout_s=5)
    try:
        for master in (0, 1, 2, 0):
            brokers.elect(master)
            connection.ask_master(LIST_TOPICS, pb.ListTopicsRequest(), connection.deadline())
            with pytest.raises(NotMasterError) as caught:
                connection.check_master(brokers.addresses[(master + 1) % 3], connection.deadline())

            connection.directory.note_failure(brokers.addresses[(master + 1) % 3], caught.value)
            assert connection.seeker.leader(connection.deadline()) == brokers.addresses[master]
    finally:
        connection.close()


def test_what_the_master_said_tells_more_than_a_search_that_was_cut_short(
    brokers: FakeBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline ends a call wherever it is; while it looks for the master again, its last words are the reason."""
    brokers.nodes[0].fail_calls["PutTopic"] = deque([(grpc.StatusCode.INTERNAL, "scripted", {})])
    with closing(BrokerConnection(brokers.addresses, timeout_s=0.5)) as connection:
        deadline = connection.deadline()
        connection.seeker.leader(deadline)

        def cut_short(limit: Deadline) -> tuple[str | None, Search]:
            wait_until(lambda: limit.expired, "the deadline")
            raise UnavailableError("no master found")

        monkeypatch.setattr(connection.seeker, "_seek", cut_short)
        with pytest.raises(StoreFailedError):
            connection.ask_master(PUT_TOPIC, pb.PutTopicRequest(topic=pb.Topic(name="a")), deadline)
