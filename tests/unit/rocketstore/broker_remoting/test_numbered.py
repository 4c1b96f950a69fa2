"""Numbered messages over remoting: a repetition is recognized, and a request is stored entirely or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from dledger.errors import LeaderNotReadyError
from dledger.remoting.codes import AnswerCode
from dledger.remoting.frame import Frame
from rocketstore.broker.sending import CREATED_MAX
from rocketstore.broker_config import BrokerConfig
from rocketstore.message.checks import PRODUCER_CHARS_MAX, check_producer_name
from rocketstore.message.record import decode_record
from rocketstore.remoting.codes import OwnCode, RequestCode
from rocketstore.remoting.extensions import NumberedMessage, NumberedSend, decode_next, decode_stored, encode_name
from rocketstore.state.changes import TopicConfig
from rocketstore.types import HALF_TOPIC, BrokerRole, PutMessageStatus, PutResult
from tests.support.remoting import RemotingSocket, send_fields
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker.harness import STORE_HOST
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness
from tests.unit.rocketstore.broker_remoting.test_access import ALICE, ROOT, harness


def numbered(body: bytes, topic: str = "T", queue_id: int = 0, properties: bytes = b"") -> NumberedMessage:
    return NumberedMessage(topic, queue_id, 0, 0, 1000, properties, body)


def begin(client: RemotingSocket, number: int, *messages: NumberedMessage, producer: str = "p") -> int:
    return client.begin(OwnCode.SEND_NUMBERED, {}, NumberedSend(producer, number, messages).encode())


def send(client: RemotingSocket, number: int, *messages: NumberedMessage, producer: str = "p") -> Frame:
    return client.answer_to(begin(client, number, *messages, producer=producer))


def bodies(broker: RemotingHarness) -> list[bytes]:
    return [decode_record(one.record).body for one in broker.store.log.records]


def test_a_request_that_waits_for_its_topic_takes_up_room() -> None:
    """Else a client fills the broker's memory with messages that cost little to send; and it is free again."""
    config = BrokerConfig(send_pending_messages_max=8)
    with RemotingHarness(config) as broker, broker.dial() as client:
        broker.state.held = []
        waiting = [begin(client, 0, *[numbered(b"x", "New") for _ in range(8)])]
        wait_until(lambda: len(broker.state.held or ()) == 1, "the topic is being made")
        refused = send(client, 0, numbered(b"y", "New"), producer="q")
        assert refused.fields["status"] == PutMessageStatus.FLOW_CONTROL
        broker.on_loop(broker.state.held[0])
        assert client.answer_to(waiting[0]).code == AnswerCode.SUCCESS
        sending = broker.broker.sending
        assert (sending.messages_pending, sending.bytes_pending) == (0, 0)
        assert send(client, 0, numbered(b"y", "New"), producer="q").code == AnswerCode.SUCCESS


def test_a_request_for_many_missing_topics_is_to_be_sent_again() -> None:
    """Its messages are looked at after each: one request of a megabyte would keep a broker busy for minutes."""
    at_once = CREATED_MAX + 1
    with RemotingHarness(BrokerConfig(queues_max=10_000)) as broker, broker.dial() as client:
        messages = [numbered(b"x", f"New{at}") for at in range(2 * at_once + 1)]
        for made in (1, 2):
            refused = send(client, 0, *messages)
            assert (refused.fields["status"], refused.fields["outcome"]) == (
                PutMessageStatus.FLOW_CONTROL,
                "not_applied",
            )
            assert sum(name.startswith("New") for name in broker.state.table) == made * at_once
        assert broker.broker.sending.messages_pending == 0
        assert send(client, 0, *messages).code == AnswerCode.SUCCESS
        assert len(bodies(broker)) == len(messages)


def test_a_repeated_request_is_answered_as_before(broker: RemotingHarness, client: RemotingSocket) -> None:
    """Also where the broker chooses the queue: it does not choose again. Each message has its place."""
    messages = [numbered(b"1", queue_id=-1), numbered(b"2", queue_id=2, properties=b"TAGS\x01a")]
    first = send(client, 0, *messages)
    assert first.code == AnswerCode.SUCCESS
    host, places = decode_stored(first.body, 2)
    assert host == STORE_HOST
    assert [queue_id for _, queue_id, _, _ in places] == [0, 2]
    assert send(client, 0, *messages).body == first.body
    assert bodies(broker) == [b"1", b"2"]
    stored = decode_record(broker.store.log.records[1].record)
    assert (stored.tags, stored.born_timestamp, stored.born_host.ip) == ("a", 1000, b"\x7f\0\0\1")


def test_the_next_number_is_known_with_what_identifies_the_memory_of_it(
    broker: RemotingHarness, client: RemotingSocket
) -> None:
    """A group remembers producers in its log, so that nothing needs to identify it."""

    def asked(name: str) -> tuple[int, str]:
        return decode_next(client.ask(OwnCode.NEXT_NUMBER, {}, encode_name(name)).body)

    send(client, 0, numbered(b"1"), numbered(b"2"))
    assert (asked("p"), asked("other")) == ((2, ""), (0, ""))
    assert client.ask(OwnCode.NEXT_NUMBER, {}, encode_name("no name")).code == AnswerCode.SYSTEM_ERROR
    broker.become(BrokerRole.SLAVE)
    assert client.ask(OwnCode.NEXT_NUMBER, {}, encode_name("p")).code == AnswerCode.SERVICE_NOT_AVAILABLE


def test_a_refused_message_keeps_the_others_of_its_request_out(broker: RemotingHarness, client: RemotingSocket) -> None:
    """The numbers of the following ones would not match the producer's. The answer says which one is to blame."""
    refused = send(client, 0, numbered(b"1"), numbered(b"2", queue_id=9), numbered(b"3"))
    assert (refused.code, "there is no queue 9" in refused.remark) == (AnswerCode.SYSTEM_ERROR, True)
    facts = {name: refused.fields[name] for name in ("status", "outcome", "message")}
    assert facts == {"status": "QUEUE_NOT_FOUND", "outcome": "not_applied", "message": "1"}
    assert bodies(broker) == []


@pytest.mark.parametrize("now", [TopicConfig("T", 1, 1), TopicConfig("T", 4, 4, 4)])
def test_a_repetition_is_recognized_if_its_queue_is_gone_since(
    broker: RemotingHarness, client: RemotingSocket, now: TopicConfig
) -> None:
    """Refused, a message without an answer would stay in doubt. What is not stored yet has no place there."""
    messages = [numbered(b"1"), numbered(b"2", queue_id=2)]
    first = send(client, 0, *messages)
    broker.state.table["T"] = now
    repeated = send(client, 0, *messages)
    assert (repeated.code, repeated.body) == (AnswerCode.SUCCESS, first.body)
    refused = send(client, 1, *messages)
    assert (refused.fields["message"], refused.fields["outcome"]) == ("1", "not_applied")
    assert bodies(broker) == [b"1", b"2"]


def test_a_broker_that_cannot_say_what_is_stored_refuses_for_now(
    broker: RemotingHarness, client: RemotingSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is to be asked once more."""
    send(client, 0, numbered(b"1"))
    broker.state.table["T"] = TopicConfig("T", 4, 4, 4)
    error = LeaderNotReadyError("not yet")
    monkeypatch.setattr(broker.store, "submit_producer", lambda _name, done: done(error))
    refused = send(client, 0, numbered(b"1"))
    assert (refused.code, refused.remark) == (AnswerCode.SERVICE_NOT_AVAILABLE, "not yet")
    assert broker.broker.sending.messages_pending == 0


@pytest.mark.parametrize(
    ("status", "outcome"), [("OUT_OF_ORDER_SEQUENCE", "not_applied"), ("UNKNOWN_PRODUCER", "not_applied")]
)
def test_what_the_log_says_of_numbers_reaches_the_producer(
    broker: RemotingHarness, client: RemotingSocket, status: str, outcome: str
) -> None:
    broker.store.refusals.append(PutResult(PutMessageStatus(status), outcome="not_applied", reason="because"))
    refused = send(client, 7, numbered(b"1"))
    assert (refused.fields["status"], refused.fields["outcome"], refused.remark) == (status, outcome, "because")
    assert refused.code != AnswerCode.SUCCESS


def test_a_slave_names_the_master(broker: RemotingHarness, client: RemotingSocket) -> None:
    broker.become(BrokerRole.SLAVE)
    refused = send(client, 0, numbered(b"1"))
    assert (refused.code, refused.fields["leader"]) == (AnswerCode.SERVICE_NOT_AVAILABLE, broker.view.leader_address)


def test_a_producers_requests_stay_in_order_while_topics_are_created(
    broker: RemotingHarness, client: RemotingSocket
) -> None:
    """Later ones, to topics that exist, would be refused as out of order; another producer's need not wait."""
    broker.state.held = []
    opaques = [
        begin(client, 0, numbered(b"0", "New")),
        begin(client, 1, numbered(b"1"), numbered(b"2", "Newer")),
        begin(client, 3, numbered(b"3")),
    ]
    wait_until(lambda: len(broker.state.held or ()) == 1, "the first topic is being created")
    assert send(client, 0, numbered(b"x"), producer="q").code == AnswerCode.SUCCESS
    assert bodies(broker) == [b"x"]
    broker.state.held.pop()()
    wait_until(lambda: len(broker.state.held or ()) == 1, "the second topic is being created")
    assert bodies(broker) == [b"x", b"0"]
    broker.state.held.pop()()
    assert [client.answer_to(one).code for one in opaques] == [AnswerCode.SUCCESS] * 3
    assert bodies(broker) == [b"x", b"0", b"1", b"2", b"3"]


def test_a_numbered_message_may_begin_a_transaction(broker: RemotingHarness, client: RemotingSocket) -> None:
    """Its answer names the queue that it is for."""
    properties = b"TRAN_MSG\x01true\x02PGROUP\x01g"
    answer = send(client, 0, numbered(b"half", queue_id=3, properties=properties))
    _, ((_, queue_id, _, _),) = decode_stored(answer.body, 1)
    assert (queue_id, decode_record(broker.store.log.records[0].record).topic) == (3, HALF_TOPIC)


@pytest.mark.parametrize(("name", "number"), [("no name", 0), ("p", -1), ("p", (1 << 63) - 1)])
def test_names_and_numbers_that_cannot_be_meant_are_refused(
    broker: RemotingHarness, client: RemotingSocket, name: str, number: int
) -> None:
    assert send(client, number, numbered(b"1"), producer=name).code == AnswerCode.SYSTEM_ERROR
    assert bodies(broker) == []


def test_too_much_under_way_is_refused_and_may_be_sent_again() -> None:
    """Of the whole broker."""
    with RemotingHarness(replace(BrokerConfig(), send_pending_messages_max=1)) as broker, broker.dial() as client:
        broker.store.hold_results = True
        first = begin(client, 0, numbered(b"1"))
        wait_until(lambda: len(broker.store.held) == 1, "it is being stored")
        refused = send(client, 1, numbered(b"2"))
        assert (refused.code, refused.fields["status"]) == (AnswerCode.SYSTEM_BUSY, "FLOW_CONTROL")
        broker.store.release_results()
        assert client.answer_to(first).code == AnswerCode.SUCCESS


# -- accounts ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def guarded() -> Iterator[RemotingHarness]:
    """With access rules: alice may send to T, and not to the topic hidden."""
    with harness() as made:
        yield made


def next_number(client: RemotingSocket, name: str) -> int:
    return decode_next(client.ask(OwnCode.NEXT_NUMBER, {}, encode_name(name)).body)[0]


def test_producers_of_two_accounts_have_nothing_to_do_with_each_other(guarded: RemotingHarness) -> None:
    """Neither can use up the other's numbers, or see them, by calling itself the same or like the other's real name."""
    with guarded.dial(ALICE) as alice, guarded.dial(ROOT) as root:
        send(alice, 0, numbered(b"alice 0"), numbered(b"alice 1"))
        (real,) = guarded.store.log.producers
        assert send(root, 0, numbered(b"root")).code == AnswerCode.SUCCESS
        assert [next_number(root, name) for name in ("p", real)] == [1, 0]
        assert next_number(alice, "p") == 2
    assert bodies(guarded) == [b"alice 0", b"alice 1", b"root"]


def test_an_accounts_names_stay_different_and_short_enough(guarded: RemotingHarness) -> None:
    """However long they are: the log takes 128 characters."""
    names = ["p", "p/1", "n" * PRODUCER_CHARS_MAX, "n" * (PRODUCER_CHARS_MAX - 1), "n" * 111, "n" * 112]
    for key in (ALICE, ROOT):
        with guarded.dial(key) as client:
            for name in names:
                assert send(client, 0, numbered(b"x"), producer=name).code == AnswerCode.SUCCESS
    own = set(guarded.store.log.producers)
    assert len(own) == 2 * len(names)
    for name in own:
        check_producer_name(name)


def test_a_denied_topic_keeps_the_whole_request_out(guarded: RemotingHarness) -> None:
    """Its other messages may come again without that one."""
    with guarded.dial(ALICE) as alice:
        refused = send(alice, 0, numbered(b"1"), numbered(b"2", "hidden"))
        assert (refused.code, refused.fields["message"]) == (AnswerCode.NO_PERMISSION, "1")
        assert "PUB on topic hidden" in refused.remark
        assert (bodies(guarded), next_number(alice, "p")) == ([], 0)


@pytest.mark.parametrize("code", [OwnCode.SEND_NUMBERED, RequestCode.SEND_BATCH_MESSAGE])
def test_what_finds_no_room_is_not_even_read(code: int) -> None:
    """Reading thousands of messages takes the loop up to a tenth of a second, and a client may send them again and
    again. Here nothing could be read.
    """
    with RemotingHarness(BrokerConfig(send_pending_messages_max=8)) as broker, broker.dial() as client:
        broker.state.held = []
        waiting = begin(client, 0, *[numbered(b"x", "New") for _ in range(8)])
        wait_until(lambda: len(broker.state.held or ()) == 1, "the topic is being made")
        refused = client.ask(code, send_fields("T"), b"no messages")
        assert (refused.code, "[OVERLOAD]" in refused.remark) == (AnswerCode.SYSTEM_BUSY, True)
        broker.on_loop(broker.state.held[0])
        assert client.answer_to(waiting).code == AnswerCode.SUCCESS
        assert "malformed" in client.ask(OwnCode.SEND_NUMBERED, {}, b"no messages").remark
