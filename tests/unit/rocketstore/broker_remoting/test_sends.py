"""Transactions as RocketMQ's producers begin and end them."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from dledger.remoting.codes import ANNOUNCED, AnswerCode
from dledger.remoting.frame import Frame
from rocketstore.broker.transactions.halves import check_record
from rocketstore.broker_config import BrokerConfig
from rocketstore.broker_remoting import sends
from rocketstore.broker_remoting.clients import RemotingLink
from rocketstore.message.ids import offset_message_id, parse_offset_message_id
from rocketstore.message.message import Message
from rocketstore.message.record import decode_record, encode_record
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import HeartbeatData, ProducerData
from rocketstore.state.changes import DeleteTopic, PutTopic, QueueOffset, TopicConfig
from rocketstore.state.tables import Tables
from rocketstore.types import HALF_TOPIC, OP_TOPIC, BrokerRole, PutMessageStatus, PutResult
from tests.support.remoting import RemotingSocket, send_fields
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker.harness import STORE_HOST
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness, captured
from tests.unit.rocketstore.remoting.golden_frames import GOLDEN

COMMIT, ROLLBACK = 8, 12
WAIT_S = 120.0
SOON = replace(BrokerConfig(), transaction_check_interval=100, transaction_time_out=0, transaction_check_max=1000)
PREPARED = "KEYS\x01k\x02TRAN_MSG\x01true\x02WAIT\x01true\x02PGROUP\x01producers\x02TAGS\x01A"


def stored(broker: RemotingHarness, topic: str) -> list[Message]:
    """All messages of a topic."""
    return [decode_record(one.record) for one in broker.store.log.records if one.head.topic == topic]


def beat(client: RemotingSocket, *groups: str, client_id: str = "p1") -> None:
    """A producer says that it lives."""
    body = HeartbeatData(client_id, tuple(map(ProducerData, groups))).encode()
    assert client.ask(RequestCode.HEART_BEAT, None, body).code == 0


def end(client: RemotingSocket, prepared: Frame, how: int, **changes: object) -> Frame:
    """END_TRANSACTION as an ordinary request, so that it is answered."""
    _, offset = parse_offset_message_id(prepared.fields["msgId"])
    fields = {
        "producerGroup": "producers",
        "tranStateTableOffset": prepared.fields["queueOffset"],
        "commitLogOffset": offset,
        "commitOrRollback": how,
        "msgId": "id",
        "fromTransactionCheck": "false",
    }
    return client.ask(RequestCode.END_TRANSACTION, fields | changes)


def test_captured_frames_begin_and_end_transactions() -> None:
    """With our offsets. RocketMQ's broker answers the same, without announcing what ours does."""
    with RemotingHarness(None, TopicConfig("ProbeTopic", 4, 4)) as broker, broker.dial() as client:
        answer = captured(client, "F38")
        expected = GOLDEN["F39"].frame
        assert (answer.code, set(answer.fields)) == (expected.code, {*expected.fields, *ANNOUNCED})
        assert {name: answer.fields[name] for name in ("queueId", "queueOffset")} == {
            "queueId": "3",
            "queueOffset": "0",
        }
        second = captured(client, "F38")
        assert (second.fields["queueId"], second.fields["queueOffset"]) == ("3", "1")
        for name, prepared in (("F40", answer), ("F41", second)):
            _, offset = parse_offset_message_id(prepared.fields["msgId"])
            client.tell(RequestCode.END_TRANSACTION, {**GOLDEN[name].frame.fields, "commitLogOffset": offset})
        wait_until(lambda: len(stored(broker, OP_TOPIC)) == 2, "both have ended")
        half = stored(broker, HALF_TOPIC)[0]
        (message,) = stored(broker, "ProbeTopic")
    sent = dict(one.split("\x01") for one in GOLDEN["F38"].frame.fields["i"].split("\x02"))
    added = {"CLUSTER": "DefaultCluster", "REAL_TOPIC": "ProbeTopic", "REAL_QID": "3"}
    assert half.properties == message.properties == sent | added
    assert (half.sys_flag, half.queue_id, message.sys_flag, message.queue_id) == (0, 0, 8, 3)
    assert (message.body, message.prepared_offset) == (b"tx commit", half.offset)


def test_a_slave_ends_none(broker: RemotingHarness, client: RemotingSocket) -> None:
    prepared = client.send(properties=PREPARED)
    broker.become(BrokerRole.SLAVE)
    assert end(client, prepared, COMMIT).code in (AnswerCode.SLAVE_NOT_AVAILABLE, AnswerCode.SERVICE_NOT_AVAILABLE)
    assert stored(broker, "T") == []


@pytest.mark.parametrize(
    ("how", "changes", "code"),
    [
        (COMMIT, {"producerGroup": "others"}, 1),
        (COMMIT, {"tranStateTableOffset": 7}, 1),
        (ROLLBACK, {"commitLogOffset": 3}, 1),
        (COMMIT, {"commitLogOffset": 1 << 70}, 1),
        (5, {}, 1),
        (0, {}, 0),
    ],
)
def test_what_does_not_end_a_transaction(
    broker: RemotingHarness, client: RemotingSocket, how: int, changes: dict[str, object], code: int
) -> None:
    prepared = client.send(properties=PREPARED)
    assert end(client, prepared, how, **changes).code == code
    assert stored(broker, "T") == stored(broker, OP_TOPIC) == []
    assert end(client, prepared, COMMIT).code == 0
    assert len(stored(broker, "T")) == 1


def test_the_real_topic_and_queue_must_do(broker: RemotingHarness, client: RemotingSocket) -> None:
    assert client.send("SELF_TEST_TOPIC", properties=PREPARED).code != 0
    assert client.send(HALF_TOPIC, properties=PREPARED).code != 0
    assert client.send(queue_id=4, properties=PREPARED).code != 0
    assert client.send(properties=PREPARED + "\x02long\x01" + "x" * 32_740).code == AnswerCode.MESSAGE_ILLEGAL
    assert broker.store.log.records == []


def test_half_messages_and_others_are_sent_over_one_connection(broker: RemotingHarness, client: RemotingSocket) -> None:
    kinds = ["", PREPARED, PREPARED, "", PREPARED]
    asked = [
        client.begin(RequestCode.SEND_MESSAGE_V2, send_fields("T", 1, properties), b"%d" % at)
        for at, properties in enumerate(kinds)
    ]
    answers = [client.answer_to(one) for one in asked]
    assert [(one.code, one.fields["queueId"], one.fields["queueOffset"]) for one in answers] == [
        (0, "1", "0"), (0, "1", "0"), (0, "1", "1"), (0, "1", "1"), (0, "1", "2"),
    ]  # fmt: skip


def test_a_producer_without_a_group_property_is_known_by_its_header(
    broker: RemotingHarness, client: RemotingSocket
) -> None:
    prepared = client.send(properties="TRAN_MSG\x01true")
    assert stored(broker, HALF_TOPIC)[0].properties["PGROUP"] == "producers"
    assert end(client, prepared, COMMIT).code == 0


@pytest.mark.parametrize(
    ("groups", "group"), [(("",), "producers"), (("one", "two"), "one"), (("", "two"), "two"), (("two", ""), "two")]
)
def test_a_transaction_is_of_the_group_whose_limit_was_looked_at(
    broker: RemotingHarness, client: RemotingSocket, groups: tuple[str, ...], group: str
) -> None:
    """However often a message names its group, or names none."""
    named = "\x02".join(f"PGROUP\x01{one}" for one in groups)
    prepared = client.send(properties=f"TRAN_MSG\x01true\x02{named}")
    assert end(client, prepared, COMMIT, producerGroup=group).code == 0
    assert stored(broker, "T")[0].properties["PGROUP"] == group


def test_transactions_may_be_refused() -> None:
    with RemotingHarness(replace(BrokerConfig(), reject_transaction_message=True)) as broker, broker.dial() as client:
        answer = client.send(properties=PREPARED)
        assert (answer.code, "rejectTransactionMessage" in answer.remark) == (AnswerCode.NO_PERMISSION, True)


def test_no_client_writes_what_transactions_are_kept_in(broker: RemotingHarness, client: RemotingSocket) -> None:
    for topic in (HALF_TOPIC, OP_TOPIC, "TRANS_CHECK_MAX_TIME_TOPIC", "RMQ_SYS_TRANS_CHECKS"):
        assert client.send(topic).code != 0
        for code in (RequestCode.DELETE_TOPIC_IN_BROKER, RequestCode.UPDATE_AND_CREATE_TOPIC):
            fields = {
                "topic": topic, "defaultTopic": "TBW102", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6,
                "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": "false",
            }  # fmt: skip
            assert client.ask(code, fields).code != 0
    assert broker.store.log.records == []


@pytest.mark.parametrize("how", [None, COMMIT, ROLLBACK])
def test_no_consumer_gets_a_half_message_back(broker: RemotingHarness, client: RemotingSocket, how: int | None) -> None:
    """What is sent back is delivered to the group: of a transaction, only its commit may be."""
    prepared = client.send(properties=PREPARED)
    if how is not None:
        assert end(client, prepared, how).code == 0
    _, offset = parse_offset_message_id(prepared.fields["msgId"])
    back = {"offset": offset, "group": "g", "delayLevel": 1}
    assert client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back).code == AnswerCode.SYSTEM_ERROR
    kept = {HALF_TOPIC, OP_TOPIC, "T"}
    assert {one.head.topic for one in broker.store.log.records} - kept <= {"RMQ_SYS_BROKER_STATE"}


LONGEST = 32_767 - len(PREPARED + "\x02CLUSTER\x01DefaultCluster\x02REAL_TOPIC\x01T\x02REAL_QID\x010\x02long\x01")
"""The value of one more property of a half message whose record can just be stored."""


def test_a_half_message_leaves_room_for_the_number_of_checks(broker: RemotingHarness, client: RemotingSocket) -> None:
    """Otherwise its producer could not be asked, and it could not be given up."""
    checks = len("\x02TRANSACTION_CHECK_TIMES\x011000")
    for more, code in ((0, AnswerCode.SUCCESS), (1, AnswerCode.MESSAGE_ILLEGAL)):
        assert client.send(properties=f"{PREPARED}\x02long\x01{'x' * (LONGEST - checks + more)}").code == code


def test_a_half_message_about_which_nobody_can_be_asked_holds_up_no_other() -> None:
    """RocketMQ's broker may have stored one without room for the number of checks."""
    with RemotingHarness(SOON) as broker, broker.dial() as client:
        text = f"{PREPARED}\x02REAL_TOPIC\x01T\x02REAL_QID\x010\x02long\x01{'x' * LONGEST}".encode()
        half = Message(HALF_TOPIC, b"", property_string=text, born_host=STORE_HOST, store_host=STORE_HOST)
        broker.store.submit([half], lambda _results: None)
        client.send(properties=PREPARED)
        beat(client, "producers")
        assert client.request(RequestCode.CHECK_TRANSACTION_STATE).fields["tranStateTableOffset"] == "1"


def test_a_producer_is_asked_as_rocketmq_asks() -> None:
    """The captured frame of a check has the same fields, and a record of the same kind."""
    golden = GOLDEN["F42"].frame
    with RemotingHarness(SOON) as broker, broker.dial() as client:
        beat(client, "producers")
        prepared = client.send(queue_id=1, properties=PREPARED + "\x02UNIQ_KEY\x01unique", body=b"tx unknown")
        check = client.request(RequestCode.CHECK_TRANSACTION_STATE)
        assert (check.is_oneway, check.fields.keys()) == (golden.is_oneway, golden.fields.keys())
        assert check.fields["offsetMsgId"] == prepared.fields["msgId"]
        assert check.fields["transactionId"] == check.fields["msgId"] == "unique"
        asked = decode_record(check.body)
        assert (asked.topic, asked.queue_id, asked.body, asked.sys_flag) == ("T", 1, b"tx unknown", 0)
        assert asked.properties["TRANSACTION_CHECK_TIMES"] == "1"
        fields = {
            "producerGroup": "producers", "commitOrRollback": COMMIT, "fromTransactionCheck": "true",
            **{name: check.fields[name] for name in ("tranStateTableOffset", "commitLogOffset", "msgId")},
        }  # fmt: skip
        client.tell(RequestCode.END_TRANSACTION, fields)
        wait_until(lambda: len(stored(broker, "T")) == 1, "it is committed")


def test_a_checks_record_says_what_rocketmqs_does() -> None:
    """All but the order of the properties, which Java's hash tables choose."""
    golden = decode_record(GOLDEN["F42"].frame.body)
    properties = {name: value for name, value in golden.properties.items() if name != "TRANSACTION_CHECK_TIMES"}
    half = replace(golden, topic=HALF_TOPIC, queue_id=0, properties=properties)
    record = encode_record(half, queue_offset=golden.queue_offset, physical_offset=golden.offset)
    assert decode_record(check_record(record, 1)) == golden


def test_each_producer_gets_its_turn_and_a_group_without_one_holds_up_nobody() -> None:
    """When who prepared the message is not there."""
    with RemotingHarness(SOON) as broker, broker.dial() as first, broker.dial() as second, broker.dial() as other:
        beat(first, "producers")
        beat(second, "producers", client_id="p2")
        other.send(properties=PREPARED.replace("producers", "gone"))
        other.send(properties=PREPARED)
        for client in (first, second):
            assert client.request(RequestCode.CHECK_TRANSACTION_STATE).fields["tranStateTableOffset"] == "1"


def test_who_prepared_a_message_is_asked_about_it_as_long_as_it_is_there() -> None:
    """Two programs that share a group by mistake know nothing of each other's transactions. Others are asked when it
    has gone."""
    with RemotingHarness(SOON) as broker, broker.dial() as first:
        with broker.dial() as second:
            beat(first, "producers")
            beat(second, "producers", client_id="p2")
            second.send(properties=PREPARED)
            for _ in range(4):
                assert second.request(RequestCode.CHECK_TRANSACTION_STATE).fields["tranStateTableOffset"] == "0"
            assert first.others == []
        assert first.request(RequestCode.CHECK_TRANSACTION_STATE).fields["tranStateTableOffset"] == "0"


def test_who_prepared_a_message_is_known_by_its_process_after_a_reconnection() -> None:
    """By the message's unique id and the client's own, as RocketMQ's clients and ours make them."""
    with RemotingHarness(SOON) as broker, broker.dial() as first, broker.dial() as second, broker.dial() as before:
        beat(first, "producers", client_id="10.0.0.1@4711#1")
        beat(second, "producers", client_id="10.0.0.1@70000")
        before.send(properties=f"{PREPARED}\x02UNIQ_KEY\x010A000001{70_000 & 0xFFFF:04X}{7:020X}")
        for _ in range(4):
            assert second.request(RequestCode.CHECK_TRANSACTION_STATE).fields["tranStateTableOffset"] == "0"
        assert first.others == []


def test_who_prepared_a_message_is_known_by_its_own_id_among_those_of_its_process() -> None:
    """Whatever connection it was sent by, also by one that another has now."""
    with RemotingHarness(SOON) as broker, broker.dial() as first, broker.dial() as second:
        beat(first, "producers", client_id="host@70000#0000beef1234")
        beat(second, "producers", client_id="host@70000#c0ffee001234")
        first.send(properties=f"{PREPARED}\x02UNIQ_KEY\x010A000001{70_000 & 0xFFFF:04X}C0FFEE00{7:012X}")
        for _ in range(4):
            assert second.request(RequestCode.CHECK_TRANSACTION_STATE).fields["tranStateTableOffset"] == "0"
        assert first.others == []


def test_nobody_else_is_asked_while_who_prepared_a_message_does_not_read() -> None:
    """It is there, so it will: another one that knows nothing of the transaction might roll it back."""
    with RemotingHarness(SOON) as broker, broker.dial() as first, broker.dial() as second:
        beat(first, "producers")
        beat(second, "producers", client_id="p2")
        tables = broker.groups.clients
        (link,) = [one.link for one in tables.producers("producers") if one.client_id == "p2"]
        assert isinstance(link, RemotingLink)
        connection = link.connection
        asked = threading.Semaphore(0)

        def refuse(_frame: Frame) -> bool:
            asked.release()
            return False

        tell = connection.tell
        connection.tell = refuse  # type: ignore[method-assign, assignment]
        second.send(properties=PREPARED)
        assert all(asked.acquire(timeout=WAIT_S) for _ in range(4))
        assert first.others == []
        connection.tell = tell  # type: ignore[method-assign]
        assert second.request(RequestCode.CHECK_TRANSACTION_STATE).fields["tranStateTableOffset"] == "0"
        first.ask(RequestCode.HEART_BEAT, None, HeartbeatData("p1", (ProducerData("producers"),)).encode())
        assert first.others == []


def test_what_nobody_answers_for_is_given_up_and_may_be_resumed() -> None:
    with RemotingHarness(replace(SOON, transaction_check_max=2)) as broker, broker.dial() as client:
        beat(client, "producers")
        prepared = client.send(properties=PREPARED)
        times = [
            decode_record(client.request(RequestCode.CHECK_TRANSACTION_STATE).body).properties[
                "TRANSACTION_CHECK_TIMES"
            ]
            for _ in range(2)
        ]
        assert times == ["1", "2"]
        wait_until(lambda: len(stored(broker, OP_TOPIC)) == 1, "it is given up")
        (kept,) = stored(broker, "TRANS_CHECK_MAX_TIME_TOPIC")
        assert (kept.body, kept.properties["REAL_TOPIC"]) == (b"hello", "T")
        assert end(client, prepared, COMMIT).code == 1
        assert client.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, {"msgId": prepared.fields["msgId"]}).code == 1
        assert client.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, {"msgId": "?"}).code == 1
        again = offset_message_id(STORE_HOST, kept.offset)
        codes = [client.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, {"msgId": again}).code for _ in range(3)]
        assert codes == [0, 1, 1]
        check = client.request(RequestCode.CHECK_TRANSACTION_STATE)
        assert check.fields["tranStateTableOffset"] == "1"
        assert decode_record(check.body).properties["TRANSACTION_CHECK_TIMES"] == "1"
        assert stored(broker, "T") == []


def test_what_was_given_up_before_its_topic_was_deleted_is_not_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor if there is a topic of that name again: its message was for the old one."""
    with RemotingHarness(replace(SOON, transaction_check_max=1)) as broker, broker.dial() as client:
        beat(client, "producers")
        client.send(properties=PREPARED)
        client.request(RequestCode.CHECK_TRANSACTION_STATE)
        wait_until(lambda: len(stored(broker, OP_TOPIC)) == 1, "it is given up")
        (kept,) = stored(broker, "TRANS_CHECK_MAX_TIME_TOPIC")
        waits = (QueueOffset("TRANS_CHECK_MAX_TIME_TOPIC", 0, kept.queue_offset + 1),)
        tables = Tables([DeleteTopic("T", waits=waits), PutTopic(TopicConfig("T", 4, 4))])
        monkeypatch.setattr(broker.state, "place_for", tables.place_for)
        asked = {"msgId": offset_message_id(STORE_HOST, kept.offset)}
        refused = client.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, asked)
        assert (refused.code, "topic T was deleted since" in refused.remark) == (1, True)
        assert len(stored(broker, HALF_TOPIC)) == 1


def test_a_resumption_that_was_refused_may_be_asked_for_again() -> None:
    """Nothing was stored: it is not being checked. One of unknown outcome may be, and a second would be another one."""
    with RemotingHarness(replace(SOON, transaction_check_max=1)) as broker, broker.dial() as client:
        beat(client, "producers")
        client.send(properties=PREPARED)
        client.request(RequestCode.CHECK_TRANSACTION_STATE)
        wait_until(lambda: len(stored(broker, OP_TOPIC)) == 1, "it is given up")
        (kept,) = stored(broker, "TRANS_CHECK_MAX_TIME_TOPIC")
        asked = {"msgId": offset_message_id(STORE_HOST, kept.offset)}
        full = PutResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, outcome="not_applied", reason="the disk is full")
        broker.store.refusals = [full] * 100  # of whatever is stored meanwhile

        refused = [client.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, asked) for _ in range(2)]
        broker.store.refusals = []
        assert [(one.code, "the disk is full" in one.remark) for one in refused] == [(1, True)] * 2
        assert client.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, asked).code == 0
        assert client.request(RequestCode.CHECK_TRANSACTION_STATE).fields["tranStateTableOffset"] == "1"

    with RemotingHarness(replace(SOON, transaction_check_max=1)) as broker, broker.dial() as client:
        beat(client, "producers")
        client.send(properties=PREPARED)
        client.request(RequestCode.CHECK_TRANSACTION_STATE)
        wait_until(lambda: len(stored(broker, OP_TOPIC)) == 1, "it is given up")
        (kept,) = stored(broker, "TRANS_CHECK_MAX_TIME_TOPIC")
        asked = {"msgId": offset_message_id(STORE_HOST, kept.offset)}
        broker.store.refusals = [PutResult(PutMessageStatus.FLUSH_DISK_TIMEOUT, outcome="unknown", reason="late")]

        codes = [client.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, asked) for _ in range(2)]
        assert ["being checked again already" in one.remark for one in codes] == [False, True]


def test_a_half_message_that_is_answered_late_counts_only_until_it_is_stored(
    broker: RemotingHarness, client: RemotingSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its group could begin less and less."""
    monkeypatch.setattr(sends, "ANSWER_S_MAX", 0.01)
    broker.store.hold_results = True
    answer = client.send(properties=PREPARED)
    assert (answer.code, "not acknowledged within" in answer.remark) == (AnswerCode.SYSTEM_ERROR, True)
    halves = broker.broker.sending._halves
    assert halves._on_their_way == {"producers": 1}
    broker.store.release_results()
    wait_until(lambda: not halves._on_their_way, "it is on its way no more")


def test_half_messages_on_their_way_count_as_open() -> None:
    """The log shows them a moment later: in between, a producer that does not wait could begin any number."""
    config = replace(BrokerConfig(), transactions_open_max=4)
    with RemotingHarness(config) as broker, broker.dial() as client:
        broker.store.hold_results, broker.store.dispatched_to = True, 0
        halves = broker.broker.sending._halves
        asked = [client.begin(RequestCode.SEND_MESSAGE_V2, send_fields("T", 0, PREPARED), b"x") for _ in range(3)]
        wait_until(lambda: halves._on_their_way.total() == 3, "three are on their way")
        refused = client.send(properties=PREPARED)
        assert (refused.code, "producer group producers has 3" in refused.remark) == (AnswerCode.SYSTEM_BUSY, True)
        broker.store.release_results()
        assert {client.answer_to(one).code for one in asked} == {0}


def test_bytes_that_look_like_what_was_given_up_are_not_resumed(
    broker: RemotingHarness, client: RemotingSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message's body may be a record with any real topic, also one of the broker's own."""
    properties = {"REAL_TOPIC": "RMQ_SYS_BROKER_STATE", "REAL_QID": "0", "PGROUP": "producers"}
    forged = Message("TRANS_CHECK_MAX_TIME_TOPIC", b"", properties=properties)
    record = encode_record(forged, queue_offset=0, physical_offset=100)
    client.send(body=record)
    monkeypatch.setattr(broker.store, "read_record", lambda _offset: record)
    asked = {"msgId": offset_message_id(STORE_HOST, 100)}
    assert client.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, asked).code == 1
    assert stored(broker, HALF_TOPIC) == []


def test_an_end_waits_for_a_new_master_to_know_what_is_open(broker: RemotingHarness, client: RemotingSocket) -> None:
    prepared = client.send(properties=PREPARED)
    transactions = broker.broker.storage.transactions
    transactions.stop()
    _, offset = parse_offset_message_id(prepared.fields["msgId"])
    fields = {"producerGroup": "producers", "tranStateTableOffset": 0, "commitLogOffset": offset, "msgId": "id"}
    asked = client.begin(RequestCode.END_TRANSACTION, {**fields, "commitOrRollback": COMMIT})
    wait_until(lambda: broker.remoting.server.requests_under_way == 1, "it waits")
    transactions.start()
    assert client.answer_to(asked).code == 0
    assert len(stored(broker, "T")) == 1


def test_an_end_does_not_wait_for_ever(broker: RemotingHarness, client: RemotingSocket) -> None:
    prepared = client.send(properties=PREPARED)
    broker.broker.storage.transactions.stop()
    assert end(client, prepared, COMMIT).code == AnswerCode.SERVICE_NOT_AVAILABLE


def test_a_producer_tries_another_broker_while_this_one_becomes_master(
    broker: RemotingHarness, client: RemotingSocket
) -> None:
    broker.broker.storage.transactions.stop()
    assert client.send(properties=PREPARED).code == AnswerCode.SERVICE_NOT_AVAILABLE
    assert broker.store.log.records == []


def test_too_many_open_transactions_are_refused_and_told() -> None:
    with RemotingHarness(replace(BrokerConfig(), transactions_open_max=2)) as broker, broker.dial() as client:
        first = client.send(properties=PREPARED)
        assert first.code == 0
        wait_until(lambda: broker.broker.storage.transactions.open_count == 1, "it is open")
        refused = client.send(properties=PREPARED)
        assert (refused.code, "transactions_open_max" in refused.remark) == (AnswerCode.SYSTEM_BUSY, True)
        assert end(client, first, ROLLBACK).code == 0
        wait_until(lambda: client.send(properties=PREPARED).code == 0, "there is room again")
