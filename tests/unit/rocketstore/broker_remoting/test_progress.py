"""Offsets of whole groups, units of queues, and what slaves fetch."""

from __future__ import annotations

import json

import pytest

from dledger.remoting.codes import AnswerCode
from dledger.remoting.frame import FRAME_BYTES_MAX
from rocketstore.broker.mastership import GroupView
from rocketstore.broker_remoting.administration import SlaveSource
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import ConsumeQueueBody, ConsumerOffsetTable, CorrectionOffsets, DelayOffsetTable
from rocketstore.state.changes import GroupConfig, QueueOffset, TopicConfig
from rocketstore.types import BrokerRole
from tests.support.remoting import RemotingSocket
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness, captured
from tests.unit.rocketstore.remoting.golden_frames import GOLDEN

NEVER = (1 << 63) - 1


def test_a_groups_offsets_are_copied(client: RemotingSocket, broker: RemotingHarness) -> None:
    """Of one topic or of all; of a topic that is gone, none."""
    broker.state.table["U"] = TopicConfig("U")
    broker.state.committed |= {("g", "T", 0): 3, ("g", "U", 1): 4, ("g", "Gone", 0): 5, ("h", "T", 0): 9}

    def clone(**more: str) -> list[QueueOffset]:
        answer = client.ask(RequestCode.CLONE_GROUP_OFFSET, {"srcGroup": "g", "destGroup": "h"} | more)
        assert answer.code == 0
        return sorted(broker.state.offsets("h"))

    assert clone(topic="T") == [("T", 0, 3)]
    assert clone() == [("T", 0, 3), ("U", 1, 4)]
    broker.become(BrokerRole.SLAVE)
    broker.view = GroupView()  # without a master to pass it on to
    refused = client.ask(RequestCode.CLONE_GROUP_OFFSET, {"srcGroup": "g", "destGroup": "h"})
    assert refused.code == AnswerCode.SERVICE_NOT_AVAILABLE


def test_a_group_that_is_online_gets_offsets_of_its_topics_only(
    client: RemotingSocket, broker: RemotingHarness
) -> None:
    broker.state.table["U"] = TopicConfig("U")
    broker.state.committed |= {("g", "T", 0): 3, ("g", "U", 1): 4}
    client.subscribe("h", "U")
    fields = {"srcGroup": "g", "destGroup": "h"}
    client.ask(RequestCode.CLONE_GROUP_OFFSET, fields)
    assert broker.state.offsets("h") == [("U", 1, 4)]
    client.ask(RequestCode.CLONE_GROUP_OFFSET, fields | {"offline": "true"})
    assert sorted(broker.state.offsets("h")) == [("T", 0, 3), ("U", 1, 4)]


def test_the_lowest_offsets_of_all_groups_but_some(client: RemotingSocket, broker: RemotingHarness) -> None:
    """RocketMQ would delete the offsets of the groups that are left out."""
    broker.state.begins["T", 1] = 4
    broker.state.committed |= {
        ("a", "T", 0): 5,
        ("b", "T", 0): 2,
        ("c", "T", 0): 1,
        ("a", "T", 1): 3,
        ("b", "T", 1): 6,
        ("compared", "T", 1): 4,
    }
    before = dict(broker.state.committed)
    fields = {"topic": "T", "compareGroup": "compared", "filterGroups": "c,d"}
    answer = client.ask(RequestCode.QUERY_CORRECTION_OFFSET, fields)
    assert CorrectionOffsets.decode(answer.body).correction_offsets == {0: 2, 1: 4}
    broker.state.committed["compared", "T", 0] = 1
    answer = client.ask(RequestCode.QUERY_CORRECTION_OFFSET, fields | {"filterGroups": "c,compared"})
    assert CorrectionOffsets.decode(answer.body).correction_offsets == {0: NEVER, 1: NEVER}
    assert broker.state.committed == before | {("compared", "T", 0): 1}
    unknown = client.ask(RequestCode.QUERY_CORRECTION_OFFSET, fields | {"topic": "Unknown"})
    assert unknown.code == AnswerCode.TOPIC_NOT_EXIST


def test_units_of_a_queue(client: RemotingSocket, broker: RemotingHarness) -> None:
    """And whether a group's subscription takes them; a group that is not there has none."""
    for tags in ("A", "B", "A"):
        client.send(properties=f"TAGS\x01{tags}")
    client.subscribe("g", "T", "A")
    fields = {"topic": "T", "queueId": 0, "index": 1, "count": 10}
    found = ConsumeQueueBody.decode(client.ask(RequestCode.QUERY_CONSUME_QUEUE, fields).body)
    heads = [one.head for one in broker.store.log.records]
    assert [(one.physic_offset, one.physic_size, one.tags_code) for one in found.queue_data] == [
        (one.offset, one.size, one.tags_code) for one in heads[1:]
    ]
    assert (found.min_queue_index, found.max_queue_index, found.subscription_data) == (0, 3, None)
    assert ([one.eval for one in found.queue_data], found.filter_data) == ([False, False], "")
    found = ConsumeQueueBody.decode(
        client.ask(RequestCode.QUERY_CONSUME_QUEUE, fields | {"consumerGroup": "g", "index": 0, "count": 2}).body
    )
    assert [one.eval for one in found.queue_data] == [True, False]
    assert found.subscription_data is not None
    assert (found.subscription_data.sub_string, found.filter_data) == ("A", "null")
    client.subscribe("filtering", "T", "a > 1", kind="SQL92")
    found = ConsumeQueueBody.decode(
        client.ask(RequestCode.QUERY_CONSUME_QUEUE, fields | {"consumerGroup": "filtering"}).body
    )
    assert [one.eval for one in found.queue_data] == [True, True]  # only records tell
    assert found.filter_data is not None
    assert json.loads(found.filter_data)["expression"] == "a > 1"
    for group, topic in (("nobody", "T"), ("g", "U")):
        client.send(topic=topic)
        asked = fields | {"consumerGroup": group, "topic": topic, "index": 0}
        found = ConsumeQueueBody.decode(client.ask(RequestCode.QUERY_CONSUME_QUEUE, asked).body)
        assert found.filter_data == f"{group}@{topic} is not online!"
        assert found.queue_data
        assert not any(one.eval for one in found.queue_data)


@pytest.mark.parametrize(
    "fields",
    [
        {"topic": "Unknown"},
        {"queueId": 3},
        {"queueId": -1},
        {"count": 0},
        {"count": 4097},
    ],
)
def test_units_that_cannot_be_told(client: RemotingSocket, fields: dict[str, object]) -> None:
    client.send()
    asked = {"topic": "T", "queueId": 0, "index": 0, "count": 10} | fields
    answer = client.ask(RequestCode.QUERY_CONSUME_QUEUE, asked)
    assert answer.code in (AnswerCode.SYSTEM_ERROR, AnswerCode.TOPIC_NOT_EXIST)
    assert answer.remark


def test_slaves_fetch_offsets_and_delays(client: RemotingSocket, broker: RemotingHarness) -> None:
    """F45 to F48."""
    assert captured(client, "F45").body == b'{"offsetTable":{}}'
    broker.state.configs["without"] = GroupConfig("without")
    broker.state.committed |= {("g", "T", 0): 1, ("g", "T", 1): 2, ("h", "T", 0): 3}
    broker.state.delays |= {1: 1, 3: 4}
    table = ConsumerOffsetTable.decode(captured(client, "F45").body).offset_table
    assert table == {"T@g": {0: 1, 1: 2}, "T@h": {0: 3}}
    theirs = ConsumerOffsetTable.decode(GOLDEN["F46"].frame.body).offset_table
    assert theirs["ProbeTopic@ProbeLite"] == {0: 1, 1: 2, 2: 3, 3: 1}
    assert DelayOffsetTable.decode(captured(client, "F47").body).offset_table == {1: 1, 3: 4}
    assert DelayOffsetTable.decode(GOLDEN["F48"].frame.body).offset_table == {1: 1, 3: 1}


def test_an_answer_that_fits_into_no_frame_is_an_error_and_not_the_end(
    client: RemotingSocket, broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocketMQ's programs take frames of 16 MiB at most."""
    broker.state.committed["g", "T", 0] = 1
    monkeypatch.setattr(SlaveSource, "_offsets_of", lambda _self, _group: b"x" * FRAME_BYTES_MAX)
    answer = client.ask(RequestCode.GET_ALL_CONSUMER_OFFSET)
    assert (answer.code, "too long" in answer.remark) == (AnswerCode.SYSTEM_ERROR, True)
    assert client.ask(RequestCode.GET_ALL_DELAY_OFFSET).code == 0
