"""Messages by key, unique id and place."""

from __future__ import annotations

import pytest

from dledger.remoting.codes import AnswerCode
from rocketstore.index.service import IndexDamagedError
from rocketstore.message.ids import parse_offset_message_id
from rocketstore.message.message import Message
from rocketstore.message.record import decode_record
from rocketstore.remoting.codes import RequestCode
from rocketstore.state.changes import TopicConfig
from rocketstore.types import HIDDEN_TOPICS
from tests.support.remoting import RemotingSocket
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness, captured
from tests.unit.rocketstore.remoting.golden_frames import GOLDEN


def test_messages_are_found_by_a_key(client: RemotingSocket, broker: RemotingHarness) -> None:
    """With where the index ends (F62, F63)."""
    for body in (b"a", b"b"):
        client.send(body=body, properties="KEYS\x01key1 key2")
    client.send(body=b"c", properties="KEYS\x01key3")
    answer = captured(client, "F62", topic="T")
    assert answer.code == 0
    assert answer.body == b"".join(one.record for one in broker.store.log.records[:2])
    last = broker.store.log.records[-1].head
    assert answer.fields == {
        "indexLastUpdateTimestamp": str(last.store_timestamp),
        "indexLastUpdatePhyoffset": str(last.offset),
    }
    assert answer.fields.keys() == GOLDEN["F63"].frame.fields.keys()


@pytest.mark.parametrize("fields", [{"key": "other"}, {"topic": "Unknown"}, {"maxNum": 0}, {"maxNum": -1}])
def test_nothing_found_has_its_own_code(client: RemotingSocket, fields: dict[str, object]) -> None:
    client.send(properties="KEYS\x01key1")
    answer = captured(client, "F62", **({"topic": "T"} | fields))
    assert (answer.code, answer.body) == (AnswerCode.QUERY_NOT_FOUND, b"")


def test_a_unique_id_is_asked_for_by_a_field_beside_the_header(client: RemotingSocket, broker: RemotingHarness) -> None:
    client.send(properties="KEYS\x01key1\x02UNIQ_KEY\x01U1")
    captured(client, "F62", topic="T", key="U1", _UNIQUE_KEY_QUERY="true")
    captured(client, "F62", topic="T", key="U1", _UNIQUE_KEY_QUERY="false")
    assert broker.store.unique_queries == [True, False]


def test_a_message_is_found_by_its_id(client: RemotingSocket) -> None:
    _, offset = parse_offset_message_id(client.send(body=b"here").fields["msgId"])
    answer = client.ask(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": offset})
    assert (answer.code, decode_record(answer.body).body) == (0, b"here")
    for wrong in (offset + 1, -1, 1 << 62):
        assert client.ask(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": wrong}).code == AnswerCode.SYSTEM_ERROR


def test_the_brokers_own_messages_are_never_shown(client: RemotingSocket, broker: RemotingHarness) -> None:
    """An id may be made up."""
    for name in HIDDEN_TOPICS:
        result = broker.store.put(Message(name, b"secret", properties={"KEYS": "key1"}))
        assert result.stored is not None
        assert client.ask(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": result.stored.offset}).code == 1
        assert captured(client, "F62", topic=name).code == AnswerCode.QUERY_NOT_FOUND


def test_messages_of_a_deleted_topic_of_the_same_name_are_not_shown(
    client: RemotingSocket, broker: RemotingHarness
) -> None:
    ids = [client.send(body=body, properties="KEYS\x01key1").fields["msgId"] for body in (b"old", b"new")]
    broker.state.table["T"] = TopicConfig("T", 4, 4)
    broker.state.begins["T", 0] = 1
    answer = captured(client, "F62", topic="T")
    assert decode_record(answer.body).body == b"new"
    _, offset = parse_offset_message_id(ids[0])
    assert client.ask(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": offset}).code == AnswerCode.SYSTEM_ERROR


def test_a_query_that_a_damaged_index_cannot_answer_may_be_asked_again(
    client: RemotingSocket, broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another member may answer it, or the same one a little later: no short answer, and no loss of data."""

    def query(*_args: object, **_named: object) -> list[bytes]:
        raise IndexDamagedError("the index is being rebuilt: retry later")

    monkeypatch.setattr(broker.store, "query", query)
    answer = captured(client, "F62", topic="T")
    assert (answer.code, "retry later" in answer.remark) == (AnswerCode.SYSTEM_ERROR, True)
