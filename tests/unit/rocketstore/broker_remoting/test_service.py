"""Requests of every kind and their answers, as RocketMQ's clients send and expect them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from dledger.remoting.codes import AnswerCode
from rocketstore.broker import sending
from rocketstore.broker_config import BrokerConfig
from rocketstore.commit_log.port import PutDone
from rocketstore.message.batch import encode_batch
from rocketstore.message.ids import parse_offset_message_id
from rocketstore.message.message import SYS_FLAG_COMMITTED, Message
from rocketstore.message.properties import join_properties
from rocketstore.message.record import decode_record
from rocketstore.message.timed import decode_handle
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import ConsumerIdList, LockedQueuesBody, LockQueuesBody
from rocketstore.remoting.topics import MessageQueue, TopicConfigTable
from rocketstore.state.changes import GroupConfig, TopicConfig
from rocketstore.types import TIMED_TOPIC, BrokerRole
from tests.support.remoting import RemotingSocket, pull_fields, send_fields
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness


def test_a_message_is_stored_as_rocketmq_stores_it(broker: RemotingHarness, client: RemotingSocket) -> None:
    answer = client.send(properties="KEYS\x01k1\x02WAIT\x01true\x02TAGS\x01A\x02", queue_id=2)
    assert (answer.code, answer.fields["queueId"], answer.fields["queueOffset"]) == (0, "2", "0")
    _, offset = parse_offset_message_id(answer.fields["msgId"])
    stored = decode_record(broker.store.read_record(offset) or b"")
    assert stored.properties == {"KEYS": "k1", "TAGS": "A", "CLUSTER": "DefaultCluster"}
    assert (stored.topic, stored.queue_id, stored.body) == ("T", 2, b"hello")


def test_messages_of_a_connection_keep_their_order(broker: RemotingHarness, client: RemotingSocket) -> None:
    asked = [
        client.begin(RequestCode.SEND_MESSAGE_V2, send_fields("T"), b"%d" % number, flag=0) for number in range(200)
    ]
    offsets = [int(client.answer_to(one).fields["queueOffset"]) for one in asked]
    assert offsets == list(range(200))
    assert [decode_record(one.record).body for one in broker.store.log.records] == [b"%d" % n for n in range(200)]


@pytest.mark.parametrize("negative", [-1, -100])
def test_any_negative_queue_means_the_next_one_in_turn(client: RemotingSocket, negative: int) -> None:
    queues = [client.send(queue_id=negative).fields["queueId"] for _ in range(4)]
    assert sorted(queues) == ["0", "1", "2", "3"]


def test_a_batch_is_stored_wholly_or_not_at_all(broker: RemotingHarness, client: RemotingSocket) -> None:
    good = encode_batch([Message("T", b"%d" % number, properties={"TAGS": "A"}) for number in range(3)])
    answer = client.ask(RequestCode.SEND_BATCH_MESSAGE, send_fields("T"), good)
    assert (answer.code, len(answer.fields["msgId"].split(",")), answer.fields["queueOffset"]) == (0, 3, "0")
    many_keys = " ".join(map(str, range(broker.config.store.message_keys_max + 1)))
    bad = encode_batch([Message("T", b"1"), Message("T", b"2", properties={"KEYS": many_keys})])
    refused = client.ask(RequestCode.SEND_BATCH_MESSAGE, send_fields("T"), bad)
    assert refused.code == AnswerCode.MESSAGE_ILLEGAL
    assert len(broker.store.log.records) == 3


def test_a_client_may_leave_the_queue_to_the_broker(broker: RemotingHarness, client: RemotingSocket) -> None:
    """Queue -1: one for each message, and the same one for all messages of a batch, also in a topic made for it."""
    batch = encode_batch([Message("T", b"%d" % number) for number in range(3)])
    for topic, body in (("T", batch), ("T", batch), ("New", batch)):
        answer = client.ask(RequestCode.SEND_BATCH_MESSAGE, send_fields(topic, queue_id=-1) | {"m": "true"}, body)
        assert (answer.code, len(answer.fields["msgId"].split(","))) == (0, 3)
        queues = {one.head.queue_id for one in broker.store.log.records[-3:]}
        assert queues == {int(answer.fields["queueId"])}
    answers = [client.send(queue_id=-1) for _ in range(4)]
    assert sorted(one.fields["queueId"] for one in answers) == ["0", "1", "2", "3"]


def test_a_topic_is_created_with_as_many_queues_as_the_producer_asks_for(
    broker: RemotingHarness, client: RemotingSocket
) -> None:
    assert client.ask(RequestCode.SEND_MESSAGE_V2, send_fields("New", queues=3), b"x").code == 0
    assert broker.state.table["New"].write_queues == 3


@pytest.mark.parametrize("allowed", [True, False])
def test_a_topic_that_every_broker_has_keeps_its_queues(
    broker: RemotingHarness, client: RemotingSocket, *, allowed: bool
) -> None:
    """It is not stored before its first message, which changes neither what it is, nor needs the right to create it."""
    client.ask(RequestCode.UPDATE_BROKER_CONFIG, None, b"autoCreateTopicEnable=%s" % str(allowed).lower().encode())
    told = TopicConfigTable.decode(client.ask(RequestCode.GET_ALL_TOPIC_CONFIG).body).topic_config_table
    for name in (broker.config.name, broker.config.cluster_name):
        assert client.ask(RequestCode.SEND_MESSAGE_V2, send_fields(name, queues=4), b"x").code == 0
    after = TopicConfigTable.decode(client.ask(RequestCode.GET_ALL_TOPIC_CONFIG).body).topic_config_table
    assert after == told
    assert after[broker.config.name].write_queue_nums == 1
    assert client.ask(RequestCode.SEND_MESSAGE_V2, send_fields("SELF_TEST_TOPIC"), b"x").code != 0


def test_a_slave_refuses_and_clients_try_another_broker(broker: RemotingHarness, client: RemotingSocket) -> None:
    broker.become(BrokerRole.SLAVE)
    assert client.send().code == AnswerCode.SERVICE_NOT_AVAILABLE


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"e": 4}, AnswerCode.SYSTEM_ERROR),
        ({"e": "x"}, AnswerCode.SYSTEM_ERROR),
        ({"b": "not a topic"}, AnswerCode.TOPIC_NOT_EXIST),
        ({"i": "TRAN_MSG\x01true\x02DELAY\x013"}, AnswerCode.MESSAGE_ILLEGAL),
        ({"f": 8}, AnswerCode.MESSAGE_ILLEGAL),
    ],
)
def test_what_cannot_be_stored_is_refused(
    client: RemotingSocket, broker: RemotingHarness, fields: dict[str, object], code: AnswerCode
) -> None:
    answer = client.ask(RequestCode.SEND_MESSAGE_V2, send_fields("T") | fields, b"x")
    assert (answer.code, bool(answer.remark)) == (code, True)
    assert not broker.store.log.records


TIMED = ("TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS")


@pytest.mark.parametrize("name", TIMED)
@pytest.mark.parametrize("others", ["", "KEYS\x01k\x02", "DELAY\x013\x02"])
def test_a_message_with_a_time_of_its_own_waits_for_it(
    client: RemotingSocket, broker: RemotingHarness, name: str, others: str
) -> None:
    """T1, T8: it is stored in the hidden topic with its real place, and a level does not count; the answer names it."""
    before_ms = int(time.time() * 1000)
    value = {"TIMER_DELAY_SEC": 3600, "TIMER_DELAY_MS": 3_600_000, "TIMER_DELIVER_MS": before_ms + 3_600_000}[name]
    answer = client.ask(RequestCode.SEND_MESSAGE_V2, send_fields("T") | {"i": f"{others}{name}\x01{value}", "e": 2})
    stored = decode_record(broker.store.log.records[0].record)
    due_ms = int(stored.properties["TIMER_OUT_MS"])
    assert before_ms + 3_600_000 <= due_ms <= int(time.time() * 1000) + 3_600_000
    assert stored.topic == TIMED_TOPIC
    assert (stored.properties["REAL_TOPIC"], stored.properties["REAL_QID"]) == ("T", "2")
    assert (answer.fields["queueId"], "DELAY" in stored.properties) == ("2", False)
    handle = decode_handle(answer.fields["recallHandle"])
    assert (handle.topic, handle.due_ms, handle.origin) == ("T", due_ms, 0)


@pytest.mark.parametrize(("days", "code"), [(39.9, AnswerCode.SUCCESS), (40.1, AnswerCode.MESSAGE_ILLEGAL)])
def test_a_time_may_be_40_days_ahead(client: RemotingSocket, days: float, code: AnswerCode) -> None:
    """T7."""
    answer = client.send(properties=f"TIMER_DELAY_SEC\x01{round(days * 86_400)}")
    assert (answer.code, "timerMaxDelaySec" in (answer.remark or "")) == (code, bool(code))


@pytest.mark.parametrize("name", TIMED)
def test_a_time_is_for_a_message_of_its_own(client: RemotingSocket, broker: RemotingHarness, name: str) -> None:
    """A batch gets one place, and a transaction has no time: a promise that cannot be kept is not made."""
    batch = encode_batch([Message("T", b"1"), Message("T", b"2", properties={name: "1999999999999"})])
    for code, fields, body in (
        (RequestCode.SEND_BATCH_MESSAGE, {}, batch),
        (RequestCode.SEND_MESSAGE_V2, {"i": f"TRAN_MSG\x01true\x02PGROUP\x01p\x02{name}\x0110"}, b"x"),
        (RequestCode.SEND_MESSAGE_V2, {"i": f"{name}\x01soon"}, b"x"),
    ):
        answer = client.ask(code, send_fields("T") | fields, body)
        assert (answer.code, bool(answer.remark)) == (AnswerCode.MESSAGE_ILLEGAL, True)
    assert not broker.store.log.records


@pytest.mark.parametrize(
    "text",
    ["TIMER_DELIVER_MS\x0110\x02KEYS\x01k", "TIMER_DELAY_SEC\x0110\x02TIMER_OUT_MS\x01170", "NOTE\x01TIMER_DELAY_SEC"],
)
def test_what_is_due_or_has_had_its_time_is_stored_at_once(
    client: RemotingSocket, broker: RemotingHarness, text: str
) -> None:
    """As in RocketMQ 5: the copy of a message that was delivered in time comes at once."""
    answer = client.send(properties=text)
    assert (answer.code, "recallHandle" in answer.fields) == (0, False)
    assert decode_record(broker.store.log.records[0].record).topic == "T"


def test_a_message_that_was_timed_elsewhere_can_be_sent_back(client: RemotingSocket, broker: RemotingHarness) -> None:
    """Those in a store of RocketMQ 5 keep the property after their delivery: neither retries nor dead letters stop."""
    broker.store.put(Message("T", b"x", properties={"TIMER_DELAY_SEC": "10"}))
    offset = broker.store.log.records[0].head.offset
    for level in (0, -1):
        fields = {"offset": offset, "group": "g", "delayLevel": level}
        assert client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, fields).code == 0
    assert [one.head.topic for one in broker.store.log.records] == ["T", "%RETRY%g", "%DLQ%g"]


def test_what_is_sent_back_takes_up_room() -> None:
    """Its messages are as large as any, and to name them costs nothing: thousands of requests would fill the memory."""
    code, most = RequestCode.CONSUMER_SEND_MSG_BACK, 4
    with RemotingHarness(BrokerConfig(send_pending_messages_max=most)) as broker, broker.dial() as client:
        broker.store.put(Message("T", b"x"))
        back = {"offset": broker.store.log.records[0].head.offset, "group": "g", "delayLevel": 0}
        assert client.ask(code, back).code == 0
        submit, held = broker.store.submit, list[Callable[[], None]]()
        broker.store.submit = lambda *given, **more: held.append(partial(submit, *given, **more))  # type: ignore[method-assign]
        asked, refusals = [client.begin(code, back) for _ in range(3 * most)], broker.remoting.server.refusals
        wait_until(lambda: len(held) + refusals[code, AnswerCode.SYSTEM_BUSY] == len(asked), "all are held or refused")
        assert 0 < len(held) <= most
        broker.on_loop(lambda: [one() for one in held])
        found = Counter(client.answer_to(one).code for one in asked)
        assert found == {0: len(held), AnswerCode.SYSTEM_BUSY: len(asked) - len(held)}
        assert (broker.broker.sending.messages_pending, broker.broker.shares.quotas.root.entries) == (0, 0)


def test_a_missing_field_is_named(client: RemotingSocket) -> None:
    fields = send_fields("T")
    del fields["b"]
    answer = client.ask(RequestCode.SEND_MESSAGE_V2, fields, b"x")
    assert (answer.code, answer.remark) == (1, "the custom field <b> is null")


def test_unknown_requests_are_answered(client: RemotingSocket) -> None:
    answer = client.ask(9999)
    assert (answer.code, answer.remark) == (3, " request type 9999 not supported")


def test_garbage_ends_the_connection_and_no_other(broker: RemotingHarness, client: RemotingSocket) -> None:
    with broker.dial() as other:
        other.socket.sendall(b"\xff\xff\xff\xffgarbage")
        assert other.is_hung_up
    assert client.send().code == 0


def test_a_consumer_gets_what_it_subscribed(broker: RemotingHarness, client: RemotingSocket) -> None:
    client.send(body=b"a", properties="TAGS\x01A")
    client.send(body=b"b", properties="TAGS\x01B")
    not_yet = client.ask(RequestCode.PULL_MESSAGE, pull_fields("g", "T"))
    assert not_yet.code == AnswerCode.SUBSCRIPTION_NOT_EXIST
    assert client.subscribe("g", "T", "B").code == 0
    pulled = client.ask(RequestCode.PULL_MESSAGE, pull_fields("g", "T"))
    assert (pulled.code, pulled.remark, pulled.fields["nextBeginOffset"]) == (0, "FOUND", "2")
    assert decode_record(pulled.body).body == b"b"
    newer = client.ask(RequestCode.PULL_MESSAGE, pull_fields("g", "T", subVersion=2))
    assert newer.code == AnswerCode.SUBSCRIPTION_NOT_LATEST


def test_a_pull_waits_for_a_message(client: RemotingSocket) -> None:
    client.subscribe("g", "T")
    waiting = client.begin(RequestCode.PULL_MESSAGE, pull_fields("g", "T", sysFlag=2, suspendTimeoutMillis=20_000))
    client.send(body=b"at last")
    assert decode_record(client.answer_to(waiting).body).body == b"at last"


def test_messages_do_not_gather_while_a_pull_waits(broker: RemotingHarness, client: RemotingSocket) -> None:
    """Its consumer would get them later."""
    assert not broker.store.pace.is_awaited()
    client.subscribe("g", "T")
    waiting = client.begin(RequestCode.PULL_MESSAGE, pull_fields("g", "T", sysFlag=2, suspendTimeoutMillis=20_000))
    wait_until(broker.store.pace.is_awaited, "the pull waits")
    with broker.dial() as producer:
        assert producer.send().code == 0
    assert client.answer_to(waiting).code == 0
    wait_until(lambda: not broker.store.pace.is_awaited(), "nobody waits any more")


def test_a_heartbeat_says_all_that_its_group_subscribes_to(broker: RemotingHarness, client: RemotingSocket) -> None:
    """A topic that it names no more is consumed no more."""
    broker.state.table["U"] = TopicConfig("U", 1, 1)
    fields = {topic: pull_fields("g", topic) for topic in ("T", "U")}
    for topic, other in (("T", "U"), ("U", "T")):
        client.subscribe("g", topic)
        assert client.ask(RequestCode.PULL_MESSAGE, fields[topic]).code == AnswerCode.PULL_NOT_FOUND
        assert client.ask(RequestCode.PULL_MESSAGE, fields[other]).code == AnswerCode.SUBSCRIPTION_NOT_EXIST


@pytest.mark.parametrize("reads", [False, True])
def test_a_groups_settings_say_where_it_pulls(*, reads: bool) -> None:
    """If slaves may be read at all: RocketMQ's whichBrokerWhenConsume."""
    with RemotingHarness(replace(BrokerConfig(), slave_read_enable=reads)) as broker, broker.dial() as client:
        broker.state.configs["g"] = GroupConfig("g", broker_id=3)
        client.send()
        client.subscribe("g", "T")
        answers = [client.ask(RequestCode.PULL_MESSAGE, pull_fields("g", "T", offset)) for offset in (0, 1)]
        assert {one.fields["suggestWhichBrokerId"] for one in answers} == {"3" if reads else "0"}


def test_members_of_a_group_hear_of_each_other(broker: RemotingHarness, client: RemotingSocket) -> None:
    client.subscribe("g", "T", client_id="one")
    with broker.dial() as other:
        other.subscribe("g", "T", client_id="two")
        assert client.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED).fields["consumerGroup"] == "g"
        listed = client.ask(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "g"})
        assert ConsumerIdList.decode(listed.body).consumer_id_list == ("one", "two")
        client.others.clear()
    client.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)  # it hung up
    listed = client.ask(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "g"})
    assert ConsumerIdList.decode(listed.body).consumer_id_list == ("one",)


def test_members_of_a_group_do_not_hear_of_each_other_if_it_is_set_so(
    broker: RemotingHarness, client: RemotingSocket
) -> None:
    """They find out when they next divide the queues, every 20 s."""
    broker.state.configs["g"] = GroupConfig("g", notify_changes=False)
    client.subscribe("g", "T", client_id="one")
    with broker.dial() as other:
        other.subscribe("g", "T", client_id="two")
        listed = client.ask(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "g"})
    assert ConsumerIdList.decode(listed.body).consumer_id_list == ("one", "two")
    assert client.others == []


def test_one_client_at_a_time_has_a_queue_to_itself(client: RemotingSocket) -> None:
    queues = (MessageQueue("T", "b", 0), MessageQueue("T", "b", 1))

    def lock(who: str) -> tuple[MessageQueue, ...]:
        body = LockQueuesBody(who, "g", queues).encode()
        return LockedQueuesBody.decode(client.ask(RequestCode.LOCK_BATCH_MQ, None, body).body).locked

    assert lock("one") == queues
    assert lock("two") == ()
    client.ask(RequestCode.UNLOCK_BATCH_MQ, None, LockQueuesBody("one", "g", queues[:1]).encode())
    assert lock("two") == queues[:1]


def test_offsets_are_kept_and_a_new_group_begins_at_the_begin(client: RemotingSocket) -> None:
    client.send()
    of_queue = {"consumerGroup": "g", "topic": "T", "queueId": 0}
    assert client.ask(RequestCode.GET_MAX_OFFSET, of_queue).fields["offset"] == "1"
    assert client.ask(RequestCode.GET_MIN_OFFSET, of_queue).fields["offset"] == "0"
    client.tell(RequestCode.UPDATE_CONSUMER_OFFSET, of_queue | {"commitOffset": 1})
    assert client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, of_queue | {"commitOffset": 1}).code == 0


def test_a_message_that_was_sent_back_comes_again_and_is_dead_in_the_end(
    broker: RemotingHarness, client: RemotingSocket
) -> None:
    sent = client.send(properties="TAGS\x01A")
    _, offset = parse_offset_message_id(sent.fields["msgId"])
    back = {"offset": offset, "group": "g", "delayLevel": 0, "originMsgId": sent.fields["msgId"], "originTopic": "T"}
    assert client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back).code == 0
    again = decode_record(broker.store.log.records[-1].record)
    assert (again.properties["RETRY_TOPIC"], again.properties["ORIGIN_MESSAGE_ID"]) == ("T", sent.fields["msgId"])
    assert (again.properties["DELAY"], again.reconsume_times, again.body) == ("3", 1, b"hello")
    assert client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back | {"delayLevel": -1}).code == 0
    dead = decode_record(broker.store.log.records[-1].record)
    assert (dead.topic, dead.properties.get("DELAY")) == ("%DLQ%g", None)
    broker.state.configs["g"] = GroupConfig("g", retry_times_max=0)
    assert client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back).code == 0
    assert decode_record(broker.store.log.records[-1].record).topic == "%DLQ%g"
    assert client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back | {"offset": 1}).code == AnswerCode.SYSTEM_ERROR


def test_a_message_that_is_sent_back_again_and_again_says_where_it_was_first(
    broker: RemotingHarness, client: RemotingSocket
) -> None:
    """Its own topic and id, not those of the retry before: those are what its consumer knows it by."""
    first = client.send(properties="TAGS\x01A").fields["msgId"]
    offset = parse_offset_message_id(first)[1]
    for times in range(1, 5):
        back = {"offset": offset, "group": "g", "delayLevel": 0}
        assert client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back).code == 0
        offset = broker.store.log.records[-1].head.offset
        again = decode_record(broker.store.log.records[-1].record)
        assert (again.properties["RETRY_TOPIC"], again.properties["ORIGIN_MESSAGE_ID"]) == ("T", first)
        assert (again.topic, again.properties["DELAY"], again.reconsume_times) == ("%RETRY%g", str(2 + times), times)


def stored_for(broker: RemotingHarness, message: Message) -> dict[str, object]:
    """The request to send back this message, which the store has."""
    assert broker.store.put(message).ok
    return {"offset": broker.store.log.records[-1].head.offset, "group": "g", "delayLevel": 0}


def test_a_transactions_message_that_was_sent_back_comes_again_and_is_dead_in_the_end(
    broker: RemotingHarness, client: RemotingSocket
) -> None:
    """What a transaction has committed is a message like others: sent back, it begins no transaction."""
    properties = {"TRAN_MSG": "true", "PGROUP": "producers", "KEYS": "k"}
    back = stored_for(broker, Message("T", b"x", 0, properties, sys_flag=SYS_FLAG_COMMITTED))
    assert client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back).code == 0
    again = decode_record(broker.store.log.records[-1].record)
    assert (again.topic, again.properties["DELAY"], again.body) == ("%RETRY%g", "3", b"x")
    assert client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back | {"delayLevel": -1}).code == 0
    assert decode_record(broker.store.log.records[-1].record).topic == "%DLQ%g"


@pytest.mark.parametrize("length", [32_000, 32_660, 32_750])
def test_a_message_with_so_many_properties_that_no_retry_can_hold_them_is_dead_at_once(
    broker: RemotingHarness, client: RemotingSocket, length: int
) -> None:
    """It would come to its consumer each second for ever. What a dead letter cannot hold is dropped, but never where
    the message comes from."""
    properties = {"KEYS": "k", "short": "s", "long": "x" * (length - 20)}
    back = stored_for(broker, Message("T", b"x", 0, dict(properties)))
    assert client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back).code == 0
    again = decode_record(broker.store.log.records[-1].record)
    assert again.topic == ("%RETRY%g" if length == 32_000 else "%DLQ%g")
    assert (again.properties["RETRY_TOPIC"], again.properties["KEYS"], again.properties["short"]) == ("T", "k", "s")
    assert ("long" in again.properties) == (length < 32_750)


def test_a_dead_letter_keeps_what_it_is_found_by(broker: RemotingHarness, client: RemotingSocket) -> None:
    """Its keys, tag and unique key stay, however long they are; others go, the fewest that do."""
    kept = {"KEYS": "k" * 8000, "TAGS": "t" * 2000, "UNIQ_KEY": "U" * 2000}
    properties = kept | {f"p{number:02}": "x" * 1000 for number in range(20)}
    properties["rest"] = "x" * (32_755 - len(join_properties(properties | {"rest": ""})))
    back = stored_for(broker, Message("T", b"x", 0, dict(properties)))
    assert client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back).code == 0
    dead = decode_record(broker.store.log.records[-1].record)
    assert dead.topic == "%DLQ%g"
    assert kept.items() <= dead.properties.items()
    assert len(properties.keys() - dead.properties.keys()) == 1


def test_a_message_of_more_keys_than_are_allowed_now_is_tried_again() -> None:
    """``messageKeysMax`` is about what clients send; the broker took this message under a higher one."""
    config = BrokerConfig()
    config = replace(config, store=replace(config.store, message_keys_max=2))
    with RemotingHarness(config) as broker, broker.dial() as client:
        back = stored_for(broker, Message("T", b"x", 0, {"KEYS": "a b c d"}))
        assert client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back).code == 0
        assert decode_record(broker.store.log.records[-1].record).topic == "%RETRY%g"


def test_a_client_that_sends_back_by_itself_ends_up_with_the_dead_too(
    broker: RemotingHarness, client: RemotingSocket
) -> None:
    fields = send_fields("%RETRY%g", properties="DELAY\x013") | {"l": 2}
    assert client.ask(RequestCode.SEND_MESSAGE_V2, fields | {"j": 1}, b"x").code == 0
    assert client.ask(RequestCode.SEND_MESSAGE_V2, fields | {"j": 2}, b"x").code == 0
    assert [decode_record(one.record).topic for one in broker.store.log.records] == ["%RETRY%g", "%DLQ%g"]


def test_a_group_may_be_kept_from_consuming(broker: RemotingHarness, client: RemotingSocket) -> None:
    client.subscribe("g", "T")
    broker.state.configs["g"] = GroupConfig("g", consume_enable=False)
    assert client.ask(RequestCode.PULL_MESSAGE, pull_fields("g", "T")).code == AnswerCode.NO_PERMISSION


@pytest.mark.parametrize("queues", [1, 4])
def test_a_message_comes_back_to_a_queue_that_there_is(
    broker: RemotingHarness, client: RemotingSocket, queues: int
) -> None:
    """The group's settings may say more than the retry topic was created with."""
    broker.state.table["%RETRY%g"] = TopicConfig("%RETRY%g", queues, queues)
    broker.state.configs["g"] = GroupConfig("g", retry_queues=64)
    _, offset = parse_offset_message_id(client.send().fields["msgId"])
    back = {"offset": offset, "group": "g", "delayLevel": 0}
    for _ in range(8):
        assert client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back).code == 0
    used = {decode_record(one.record).queue_id for one in broker.store.log.records[1:]}
    assert used <= set(range(queues))


@pytest.mark.parametrize(
    ("properties", "waits"),
    [
        ("", True),
        ("WAIT\x01false", False),
        ("AWAIT\x01false", True),
        ("A\x011\x02WAIT\x01false\x02", False),
        ("A\x01WAIT\x01false", True),
        ("WAIT\x01falsehood", True),
    ],
)
def test_only_the_property_itself_keeps_a_message_from_being_waited_for(
    broker: RemotingHarness,
    client: RemotingSocket,
    monkeypatch: pytest.MonkeyPatch,
    properties: str,
    waits: bool,  # a parameter of the test
) -> None:
    """Else it would be acknowledged before it is on disk."""
    seen: list[bool] = []
    submit = broker.store.submit

    def observed(messages: Sequence[Message], done: PutDone, *, wait: bool = True, **others: Any) -> None:  # noqa: ANN401
        seen.append(wait)
        submit(messages, done, wait=wait, **others)

    monkeypatch.setattr(broker.store, "submit", observed)
    assert client.send(properties=properties).code == 0
    assert seen == [waits]


def test_names_in_locks_have_a_length(client: RemotingSocket) -> None:
    """Expired locks are kept until there are half a million."""
    body = LockQueuesBody("g", "c", (MessageQueue("T" * 2000, "b", 0),)).encode()
    assert client.ask(RequestCode.LOCK_BATCH_MQ, None, body).code == AnswerCode.SYSTEM_ERROR


def test_a_message_does_not_wait_for_its_topic_until_the_client_hangs_up(
    broker: RemotingHarness, client: RemotingSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would fail everything else that is under way."""
    monkeypatch.setattr(sending, "CREATE_S_MAX", 0.05)
    monkeypatch.setattr(broker.state, "put_topic", lambda *_, **__: None)  # no majority
    assert client.send("New").code == AnswerCode.SERVICE_NOT_AVAILABLE
    assert not broker.store.log.records
    monkeypatch.undo()
    assert client.send("T").code == 0


def test_a_slave_that_is_behind_moves_no_consumer(broker: RemotingHarness, client: RemotingSocket) -> None:
    """While there is no master, consumers pull from it: they would consume again what the master has given them."""
    client.send()
    client.subscribe("g", "T")
    ahead = pull_fields("g", "T", 100)
    assert client.ask(RequestCode.PULL_MESSAGE, ahead).code == AnswerCode.PULL_OFFSET_MOVED
    broker.become(BrokerRole.SLAVE)
    pulled = client.ask(RequestCode.PULL_MESSAGE, ahead)
    assert (pulled.code, pulled.fields["nextBeginOffset"]) == (AnswerCode.PULL_NOT_FOUND, "100")
