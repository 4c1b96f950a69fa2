"""How topics, groups and clients stand, as mqadmin asks for it."""

from __future__ import annotations

import json

import pytest

from dledger.remoting.codes import AnswerCode
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import (
    ConsumerConnectionList,
    ConsumeStats,
    ConsumeStatsList,
    ConsumeTimeSpans,
    GroupList,
    ProducerConnectionList,
    ProducersByGroup,
    TopicOffset,
    TopicStatsTable,
)
from rocketstore.remoting.topics import MessageQueue
from rocketstore.state.changes import TopicConfig
from rocketstore.types import HIDDEN_TOPICS
from tests.support.remoting import RemotingSocket
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness, captured
from tests.unit.rocketstore.remoting.golden_frames import GOLDEN


def test_a_topics_queues_have_their_ends(broker: RemotingHarness, client: RemotingSocket) -> None:
    """All of them, also the empty ones (F57, F58)."""
    client.send(queue_id=1)
    client.send(queue_id=1)
    stats = TopicStatsTable.decode(captured(client, "F57", topic="T").body).offset_table
    assert {queue.queue_id for queue in stats} == {0, 1, 2, 3}
    last = broker.store.log.records[-1].head.store_timestamp
    name = broker.config.name
    assert stats[MessageQueue("T", name, 1)] == TopicOffset(0, 2, last)
    assert stats[MessageQueue("T", name, 0)] == TopicOffset(0, 0, 0)
    theirs = TopicStatsTable.decode(GOLDEN["F58"].frame.body)
    assert {queue.queue_id for queue in theirs.offset_table} == {0, 1, 2, 3}


def test_a_topic_that_nobody_may_know_has_no_stats(broker: RemotingHarness, client: RemotingSocket) -> None:
    for name in HIDDEN_TOPICS:
        broker.state.table[name] = TopicConfig(name)
    for name in (*HIDDEN_TOPICS, "Unknown"):
        assert captured(client, "F57", topic=name).code == AnswerCode.TOPIC_NOT_EXIST
    assert captured(client, "F57", topic="TBW102").code == 0


def test_a_groups_progress(broker: RemotingHarness, client: RemotingSocket) -> None:
    """Of all topics with offsets, or of the one that is asked for (F59)."""
    broker.state.table["U"] = TopicConfig("U", 1, 1)
    for _ in range(3):
        client.send()
    broker.state.committed |= {("g", "T", 0): 2, ("g", "U", 0): 0}
    name = broker.config.name
    answer = client.ask(RequestCode.GET_CONSUME_STATS, {"consumerGroup": "g"})
    stats = ConsumeStats.decode(answer.body).offset_table
    assert len(stats) == 5
    place = stats[MessageQueue("T", name, 0)]
    assert (place.broker_offset, place.consumer_offset, place.pull_offset) == (3, 2, 2)
    assert place.last_timestamp == broker.store.log.records[1].head.store_timestamp
    asked = client.ask(RequestCode.GET_CONSUME_STATS, {"consumerGroup": "g", "topic": "U"})
    assert list(ConsumeStats.decode(asked.body).offset_table) == [MessageQueue("U", name, 0)]
    none = client.ask(RequestCode.GET_CONSUME_STATS, {"consumerGroup": "nobody"})
    assert (none.code, ConsumeStats.decode(none.body).offset_table) == (0, {})
    theirs = ConsumeStats.decode(GOLDEN["F59"].frame.body)
    assert theirs.offset_table[MessageQueue("ProbeTopic", "broker-a", 0)].broker_offset == 1


def test_topics_that_a_group_no_longer_subscribes_are_left_out(broker: RemotingHarness, client: RemotingSocket) -> None:
    broker.state.table["U"] = TopicConfig("U", 1, 1)
    broker.state.committed |= {("g", "T", 0): 0, ("g", "U", 0): 0}
    client.subscribe("g", "U")
    answer = client.ask(RequestCode.GET_CONSUME_STATS, {"consumerGroup": "g"})
    assert {queue.topic for queue in ConsumeStats.decode(answer.body).offset_table} == {"U"}


def test_all_groups_together(broker: RemotingHarness, client: RemotingSocket) -> None:
    broker.state.table["O"] = TopicConfig("O", 1, 1, order=True)
    for _ in range(3):
        client.send()
    broker.state.committed |= {("g", "T", 0): 1, ("h", "T", 0): 3, ("h", "O", 0): 0}

    def ask(is_order: str) -> ConsumeStatsList:
        answer = client.ask(RequestCode.GET_BROKER_CONSUME_STATS, {"isOrder": is_order})
        return ConsumeStatsList.decode(answer.body)

    found = ask("false")
    assert [list(one) for one in found.consume_stats_list] == [["g"], ["h"]]
    assert (found.total_diff, found.broker_addr) == (2, "127.0.0.1:10911")
    ordered = ask("true")
    (only,) = ordered.consume_stats_list
    assert [queue.topic for one in only["h"] for queue in one.offset_table] == ["O"]


def test_an_answer_that_would_be_about_too_many_queues_is_refused(
    broker: RemotingHarness, client: RemotingSocket
) -> None:
    for number in range(20):
        broker.state.table[f"T{number}"] = TopicConfig(f"T{number}", 1024, 1024)
        broker.state.committed["g", f"T{number}", 0] = 0
    answer = client.ask(RequestCode.GET_CONSUME_STATS, {"consumerGroup": "g"})
    assert (answer.code, "20480 queues" in answer.remark) == (AnswerCode.SYSTEM_ERROR, True)


def test_how_old_is_what_a_group_still_needs(broker: RemotingHarness, client: RemotingSocket) -> None:
    for _ in range(3):
        client.send()
    broker.state.committed["g", "T", 0] = 1
    times = [one.head.store_timestamp for one in broker.store.log.records]
    answer = client.ask(RequestCode.QUERY_CONSUME_TIME_SPAN, {"topic": "T", "group": "g"})
    spans = ConsumeTimeSpans.decode(answer.body).consume_time_span_set
    first, *others = spans
    assert (first.min_time_stamp, first.max_time_stamp, first.consume_time_stamp) == (times[0], times[2], times[0])
    assert 0 <= first.delay_time < 3_600_000
    assert [(one.max_time_stamp, one.delay_time) for one in others] == [(0, 0)] * 3
    unknown = client.ask(RequestCode.QUERY_CONSUME_TIME_SPAN, {"topic": "Unknown", "group": "g"})
    assert unknown.code == AnswerCode.TOPIC_NOT_EXIST


def test_the_clients_of_a_group(client: RemotingSocket) -> None:
    client.subscribe("g", "T", "A", client_id="one")
    here = "{}:{}".format(*client.socket.getsockname())
    answer = client.ask(RequestCode.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "g"})
    consumers = ConsumerConnectionList.decode(answer.body)
    (connection,) = consumers.connection_set
    assert (connection.client_id, connection.client_addr, connection.language.name) == ("one", here, "PYTHON")
    assert consumers.subscription_table["T"].sub_string == "A"
    assert json.loads(answer.body)["messageModel"] == "CLUSTERING"
    answer = client.ask(RequestCode.GET_PRODUCER_CONNECTION_LIST, {"producerGroup": "g"})
    assert ProducerConnectionList.decode(answer.body).connection_set == (connection,)
    everybody = ProducersByGroup.decode(client.ask(RequestCode.GET_ALL_PRODUCER_INFO).body).data
    assert [(one.client_id, one.remote_ip) for one in everybody["g"]] == [("one", f"/{here}")]


@pytest.mark.parametrize(
    ("code", "field", "refusal"),
    [
        (RequestCode.GET_CONSUMER_CONNECTION_LIST, "consumerGroup", AnswerCode.CONSUMER_NOT_ONLINE),
        (RequestCode.GET_PRODUCER_CONNECTION_LIST, "producerGroup", AnswerCode.SYSTEM_ERROR),
    ],
)
def test_a_group_without_clients(client: RemotingSocket, code: int, field: str, refusal: AnswerCode) -> None:
    assert client.ask(code, {field: "nobody"}).code == refusal


def test_the_groups_of_a_topic(broker: RemotingHarness, client: RemotingSocket) -> None:
    """Those that subscribe to it now, and those that did."""
    client.subscribe("here", "T")
    broker.state.committed |= {("there", "T", 0): 0, ("elsewhere", "U", 0): 0}
    answer = client.ask(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, {"topic": "T"})
    assert GroupList.decode(answer.body).group_list == ("here", "there")
