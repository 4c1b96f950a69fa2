"""Sending: queue choice, refusals per message, topics made on demand, slaves, streams and their limits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import grpc
import pytest

from dledger.access.quota import Limits, Quotas
from dledger.rpc import loops
from dledger.rpc.clients.answers import AnswerRoom
from dledger.rpc.clients.calls import Call
from dledger.rpc.clients.connections import Connection
from rocketstore.broker.sending import MessageSource, SendBatch
from rocketstore.broker_config import BrokerConfig
from rocketstore.broker_grpc.codec import ResultEncoder, SendCall
from rocketstore.broker_grpc.send import STREAM_REQUESTS_PENDING_MAX, SendStream
from rocketstore.config import MessageStoreConfig
from rocketstore.message.message import SYS_FLAG_PREPARED
from rocketstore.message.record import decode_record
from rocketstore.pb import broker_pb2 as pb
from rocketstore.state.changes import TopicConfig
from rocketstore.types import BROKER_STATE_TOPIC, SCHEDULE_TOPIC, BrokerRole, PutMessageStatus, PutResult
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker.harness import STORE_HOST, Harness, failing


@pytest.fixture
def broker() -> Iterator[Harness]:
    """A broker with a topic T of 4 queues."""
    with Harness() as harness:
        yield harness


def message(topic: str = "T", queue_id: int = 0, **fields: object) -> pb.Message:
    """A message."""
    return pb.Message(topic=topic, queue_id=queue_id, **({"body": b"x"} | fields))  # type: ignore[arg-type]


def test_a_sent_message_is_stored_as_it_was_sent(broker: Harness) -> None:
    """Every field reaches the record; the answer names its places and an id with which it is found again."""
    (result,) = broker.send(
        message(queue_id=2, body=b"hello", properties={"TAGS": "A"}, flag=7, born_timestamp_ms=5, reconsume_times=3)
    )

    stored = decode_record(broker.store.log.records[0].record)
    assert (stored.topic, stored.body, stored.queue_id, stored.tags) == ("T", b"hello", 2, "A")
    assert (stored.flag, stored.born_timestamp, stored.reconsume_times) == (7, 5, 3)
    assert stored.born_host.ip == b"\x7f\0\0\1"
    assert (result.status, result.outcome, result.queue_id, result.queue_offset) == ("PUT_OK", "stored", 2, 0)
    assert result.message_id == "7F00000100002A9F0000000000000000"
    assert broker.call("QueryById", pb.QueryByIdRequest(message_id=result.message_id), pb.RecordsResponse).records == [
        broker.store.log.records[0].record
    ]


def test_the_broker_chooses_queues_in_turn_if_asked_to(broker: Harness) -> None:
    """Queue -1: round robin over the queues that take writes, across requests."""
    first = broker.send(message(queue_id=-1), message(queue_id=-1), message(queue_id=-1))
    second = broker.send(message(queue_id=-1), message(queue_id=-1))

    assert [one.queue_id for one in (*first, *second)] == [0, 1, 2, 3, 0]


def test_a_refused_message_does_not_take_its_neighbours_along(broker: Harness) -> None:
    """Each message of a request has its own answer, in order; only the bad ones are refused."""
    broker.state.table["R"] = TopicConfig("R", 1, 1, 4)

    results = broker.send(
        message(queue_id=1),
        message(queue_id=4),
        message("R"),
        message(SCHEDULE_TOPIC),
        message(BROKER_STATE_TOPIC),
        message("no/such"),
        message(sys_flag=SYS_FLAG_PREPARED),
        message(queue_id=-2),
        message(queue_id=3),
    )

    assert [one.status for one in results] == ["PUT_OK", *["MESSAGE_ILLEGAL"] * 7, "PUT_OK"]
    assert [one.outcome for one in results[1:-1]] == ["not_applied"] * 7
    assert [one.queue_id for one in (results[0], results[-1])] == [1, 3]
    assert len(broker.store.log.records) == 2
    assert "4 write queues" in results[1].reason
    assert "permission 4" in results[2].reason


def test_a_half_message_is_never_an_ordinary_one_however_it_says_so(broker: Harness) -> None:
    """RocketMQ's clients say it by a property: stored as an ordinary message it would be delivered at once."""
    results = broker.send(
        message(properties={"TRAN_MSG": "true"}),
        message(property_string=b"KEYS\x01k\x02TRAN_MSG\x01TRUE\x02PGROUP\x01g"),
        message(property_string=b"TRAN_MSG\x01false"),
    )

    assert [one.status for one in results] == ["MESSAGE_ILLEGAL", "SERVICE_NOT_AVAILABLE", "PUT_OK"]
    assert ["producer group" in results[0].reason, "not quite the master" in results[1].reason] == [True, True]
    assert len(broker.store.log.records) == 1


def test_what_the_store_finds_illegal_is_left_out_and_the_rest_stored() -> None:
    """The store refuses all it is given because of one message; its neighbours are stored all the same."""
    with Harness(BrokerConfig(store=MessageStoreConfig(max_message_size=100))) as broker:
        refusal = PutResult(PutMessageStatus.MESSAGE_ILLEGAL, outcome="not_applied", reason="too large")
        broker.store.refusals.append(refusal)

        results = broker.send(message(), message(body=b"x" * 101), message())

        assert [one.status for one in results] == ["PUT_OK", "MESSAGE_ILLEGAL", "PUT_OK"]
        assert len(broker.store.log.records) == 2


@pytest.mark.parametrize("encoded", [True, False])
def test_a_message_has_a_bounded_number_of_keys(broker: Harness, encoded: bool) -> None:
    """Each costs as much to index as a message; the others of the request are stored."""

    def with_keys(keys: str) -> pb.Message:
        if encoded:
            return pb.Message(topic="T", body=b"x", property_string=f"TAGS\x01a\x02KEYS\x01{keys}".encode())
        return pb.Message(topic="T", body=b"x", properties={"KEYS": keys})

    most = " ".join(f"key-{number}" for number in range(64))
    results = broker.send(with_keys(most), with_keys(f"{most} k"), with_keys("k " * 16_000), with_keys("k" * 9000))

    assert [one.status for one in results] == ["PUT_OK", *["MESSAGE_ILLEGAL"] * 3]
    assert "65 keys (KEYS); at most 64" in results[1].reason
    assert "at most 8192" in results[3].reason


@pytest.mark.parametrize("name", ["TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"])
def test_a_message_that_shall_come_at_a_time_of_its_own_is_refused(broker: Harness, name: str) -> None:
    """It would come at once; the others of the request are stored."""
    results = broker.send(
        message(properties={name: "10"}),
        message(property_string=f"TAGS\x01a\x02{name}\x0110".encode()),
        message(properties={"TRAN_MSG": "true", "PGROUP": "g", name: "10"}, sys_flag=SYS_FLAG_PREPARED),
        message(),
    )

    assert [one.status for one in results] == [*["MESSAGE_ILLEGAL"] * 3, "PUT_OK"]
    assert all(name in one.reason for one in results[:3])


def test_an_unknown_topic_is_made_by_sending_to_it_once(broker: Harness) -> None:
    """autoCreateTopicEnable, with defaultTopicQueueNums queues."""
    results = broker.send(message("New", -1), message("New", -1))

    assert broker.state.table["New"] == TopicConfig("New", 8, 8, 6)
    assert [one.queue_id for one in results] == [0, 1]


@pytest.mark.parametrize(
    ("failure", "status"),
    [("UNKNOWN_ERROR", "OS_PAGECACHE_BUSY"), ("MESSAGE_ILLEGAL", "MESSAGE_ILLEGAL")],
)
def test_a_topic_that_cannot_be_made_refuses_its_messages(broker: Harness, failure: str, status: str) -> None:
    """Not applied; worth a repetition unless the topic can never be made. Later it may work."""
    broker.state.refusal = PutResult(PutMessageStatus(failure), outcome="unknown", reason="no quorum")

    results = broker.send(message("New"), message())
    broker.state.refusal = None

    assert [(one.status, one.outcome) for one in results] == [(status, "not_applied"), ("PUT_OK", "stored")]
    assert "no quorum" in results[0].reason
    assert broker.send(message("New"))[0].status == "PUT_OK"


def test_without_automatic_creation_an_unknown_topic_is_refused() -> None:
    """The reason names the setting."""
    with Harness(BrokerConfig(auto_create_topic_enable=False)) as broker:
        (result,) = broker.send(message("New"))

        assert result.status == "MESSAGE_ILLEGAL"
        assert "autoCreateTopicEnable" in result.reason
        assert "New" not in broker.state.table


def test_a_slave_refuses_and_names_the_master(broker: Harness) -> None:
    """Not applied, so the producer may go there at once; a topic is not made by a slave."""
    broker.become(BrokerRole.SLAVE)

    results = broker.send(message(), message("New"))

    assert {(one.status, one.outcome, one.leader) for one in results} == {
        ("SERVICE_NOT_AVAILABLE", "not_applied", "host:1")
    }


def test_a_full_broker_refuses_single_sends_as_busy() -> None:
    """Beyond a connection's half of send_pending_messages_max, until something has been answered."""
    with Harness(BrokerConfig(send_pending_messages_max=4)) as broker:
        broker.store.hold_results = True
        sends = [threading.Thread(target=broker.send, args=(message(),)) for _ in range(2)]
        for one in sends:
            one.start()
        wait_until(lambda: len(broker.store.held) == 2, "two sends are pending")

        (busy,) = broker.send(message())
        broker.store.release_results()
        for one in sends:
            one.join()

        assert (busy.status, busy.outcome) == ("OS_PAGECACHE_BUSY", "not_applied")
        wait_until(lambda: broker.send(message())[0].status == "PUT_OK", "there is room again")


def test_a_stream_answers_every_request_with_its_id(broker: Harness) -> None:
    """Requests of a stream are stored in order, also when the first of them has to wait for its topic to be made."""
    broker.state.held = []
    requests = [pb.SendRequest(request_id=7, messages=[message("New", body=b"0")])]
    requests += [pb.SendRequest(request_id=8 + at, messages=[message(body=b"%d" % (at + 1))]) for at in range(3)]

    answers = broker.stream("SendStream", iter([one.SerializeToString() for one in requests]))
    wait_until(lambda: bool(broker.state.held), "the topic is being made")
    assert not broker.store.log.records
    broker.state.held.pop()()
    found = [pb.SendResponse.FromString(one) for one in answers]

    assert [one.request_id for one in found] == [7, 8, 9, 10]
    assert [decode_record(one.record).body for one in broker.store.log.records] == [b"0", b"1", b"2", b"3"]


def test_a_stream_is_not_read_while_too_much_is_pending() -> None:
    """Flow control: producers are held back through gRPC, nothing is refused."""
    with Harness(BrokerConfig(send_pending_messages_max=6)) as broker:
        broker.store.hold_results = True
        request = pb.SendRequest(messages=[message()]).SerializeToString()

        answers = broker.stream("SendStream", iter([request] * 10))
        wait_until(lambda: len(broker.store.held) == 3, "its half is pending")
        assert len(broker.store.log.records) == 3
        broker.store.release_results()

        assert sum(len(pb.SendResponse.FromString(one).results) for one in answers) == 10


class UnreadContext:
    """A client that sends without end and takes no answer."""

    def __init__(self) -> None:
        self.requests = 0

    async def send_initial_metadata(self, _metadata: object) -> None:
        """Nothing."""

    async def read(self) -> bytes:
        self.requests += 1
        return b""

    async def write(self, _answer: bytes) -> None:
        await asyncio.Event().wait()


class ImmediateSender:
    """Stores everything at once."""

    is_full = False

    async def ensure_topics(self, _caller: MessageSource, _messages: object) -> None:
        """All exist."""

    def submit(self, _caller: MessageSource, _batch: SendBatch, done: Callable[[list[PutResult]], None]) -> None:
        done([])

    async def wait_room(self, room: asyncio.Event) -> None:
        await room.wait()


def test_a_producer_that_takes_no_answers_is_not_read_for_ever() -> None:
    """Answers that nobody takes count as pending, so they are bounded like everything else."""

    async def serve() -> int:
        context, stop = UnreadContext(), asyncio.Event()
        quota = Quotas(Limits(1 << 20, 1 << 30, 1), owner_percent=100).of("a", "a", "a")
        call = Call(context, Connection("ipv4:127.0.0.1:1"), quota, None, AnswerRoom())  # type: ignore[arg-type]
        stream = SendStream(
            call,
            ImmediateSender(),  # type: ignore[arg-type]
            lambda _data: SendCall(1, MessageSource(quota), SendBatch([], 0)),
            ResultEncoder(STORE_HOST),
            1 << 20,
        )
        serving = asyncio.create_task(stream.run(stop))
        for _ in range(2 * STREAM_REQUESTS_PENDING_MAX):
            await asyncio.sleep(0)
        serving.cancel()
        return context.requests

    assert loops.run(serve()) == STREAM_REQUESTS_PENDING_MAX


def test_garbage_ends_a_stream_with_a_reason(broker: Harness) -> None:
    """INVALID_ARGUMENT, as for a single send."""
    with failing(grpc.StatusCode.INVALID_ARGUMENT, "not a valid SendRequest"):
        list(broker.stream("SendStream", iter([b"\xff\xff"])))
    with failing(grpc.StatusCode.INVALID_ARGUMENT, "not a valid SendRequest"):
        broker.call_bytes("Send", b"\xff\xff")


PULL = pb.PullRequest(group="g", topic="T", queue_id=0, offset=0, max_messages=1)


def test_no_more_streams_than_allowed() -> None:
    """streams_max, for sends and for pulls: consumers leave room for producers."""
    with Harness(BrokerConfig(streams_max=1)) as broker:
        requests: SimpleQueue[bytes | None] = SimpleQueue()
        first = broker.stream("SendStream", iter(requests.get, None))
        requests.put(pb.SendRequest(messages=[message()]).SerializeToString())
        wait_until(lambda: bool(broker.store.log.records), "the stream is open")

        with failing(grpc.StatusCode.RESOURCE_EXHAUSTED, "has 1 open send streams"):
            list(broker.stream("SendStream", iter([b""])))
        assert len(list(broker.stream("PullStream", iter([PULL.SerializeToString()])))) == 1
        requests.put(None)
        assert len(list(first)) == 1


def test_a_stopping_broker_answers_what_it_took_and_ends_the_stream(broker: Harness) -> None:
    """Whoever sent it learns what became of it; what it sends later is certainly not stored, and sent elsewhere."""
    broker.store.hold_results = True
    requests: SimpleQueue[bytes | None] = SimpleQueue()
    answers = broker.stream("SendStream", iter(requests.get, None))
    requests.put(pb.SendRequest(request_id=1, messages=[message()]).SerializeToString())
    wait_until(lambda: len(broker.store.held) == 1, "the request is pending")

    stopper = threading.Thread(target=lambda: broker.stop(grace_s=10))
    stopper.start()
    broker.store.release_results()
    found = [pb.SendResponse.FromString(next(iter(answers))).request_id]
    with failing(grpc.StatusCode.UNAVAILABLE, "this broker is stopping") as metadata:
        found += [pb.SendResponse.FromString(one).request_id for one in answers]
    stopper.join()
    requests.put(None)

    assert found == [1]
    assert (metadata["outcome"], metadata["leader"]) == ("not_applied", "host:1")
