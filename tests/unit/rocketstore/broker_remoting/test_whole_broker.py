"""Requests of administrators to a broker with its own files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dledger.config import AccessConfig
from dledger.remoting.codes import AnswerCode
from rocketstore.message.ids import parse_offset_message_id
from rocketstore.message.record import decode_record
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import ConsumeQueueBody, ConsumeStats, TopicOffset, TopicStatsTable
from rocketstore.remoting.topics import KVTable, MessageQueue
from rocketstore.server import BrokerServer
from tests.support.remoting import RemotingSocket, pull_fields
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker_remoting.harness import captured
from tests.unit.rocketstore.broker_remoting.test_running_broker import NOT_HERE
from tests.unit.rocketstore.remoting.golden_frames import GOLDEN
from tests.unit.rocketstore.test_server import plain


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerServer]:
    server = BrokerServer(plain(tmp_path)).start()
    try:
        yield server
    finally:
        server.stop()


def test_administrators_find_everything(broker: BrokerServer) -> None:
    with RemotingSocket(broker.port) as client:
        assert captured(client, "F60").code == 0
        sent = client.send("T2", b"found", properties="KEYS\x01key1\x02UNIQ_KEY\x01U1\x02TAGS\x01A")
        _, offset = parse_offset_message_id(sent.fields["msgId"])
        wait_until(
            lambda: broker.store.index_end().offset == offset and broker.store.max_offset("T2", 0) == 1, "dispatch"
        )
        found = captured(client, "F62", topic="T2")
        assert (found.code, decode_record(found.body).body) == (0, b"found")
        assert found.fields["indexLastUpdatePhyoffset"] == str(offset)
        last_ms = decode_record(found.body).store_timestamp
        assert abs(int(found.fields["indexLastUpdateTimestamp"]) - last_ms) < 1000  # the index counts in seconds
        unique = captured(client, "F62", topic="T2", key="U1", _UNIQUE_KEY_QUERY="true")
        assert unique.body == found.body
        assert client.ask(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": offset}).body == found.body
        stats = TopicStatsTable.decode(captured(client, "F57", topic="T2").body).offset_table
        queue = MessageQueue("T2", broker.config.name, 0)
        assert (stats[queue].max_offset, stats[queue].last_update_timestamp) == (1, last_ms)
        of_queue = {"consumerGroup": "g", "topic": "T2", "queueId": 0, "commitOffset": 1}
        assert client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, of_queue).code == 0
        progress = ConsumeStats.decode(client.ask(RequestCode.GET_CONSUME_STATS, {"consumerGroup": "g"}).body)
        place = progress.offset_table[queue]
        assert (place.broker_offset, place.consumer_offset, place.last_timestamp) == (1, 1, last_ms)
        fields = {"topic": "T2", "queueId": 0, "index": 0, "count": 10}
        (unit,) = ConsumeQueueBody.decode(client.ask(RequestCode.QUERY_CONSUME_QUEUE, fields).body).queue_data
        assert (unit.physic_offset, unit.physic_size) == (offset, len(found.body))
        assert client.ask(RequestCode.DELETE_EXPIRED_COMMITLOG).code == 0


def test_a_deleted_topics_messages_are_not_found(broker: BrokerServer) -> None:
    """Also not in a topic of the same name."""
    with RemotingSocket(broker.port) as client:
        captured(client, "F60")
        sent = client.send("T2", b"old", properties="KEYS\x01key1")
        _, offset = parse_offset_message_id(sent.fields["msgId"])
        wait_until(lambda: broker.store.index_end().offset == offset, "the index")
        assert client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T2"}).code == 0
        captured(client, "F60")
        assert captured(client, "F62", topic="T2").code == AnswerCode.QUERY_NOT_FOUND
        assert client.ask(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": offset}).code == AnswerCode.SYSTEM_ERROR


def test_a_topic_made_anew_begins_behind_the_old_one_whoever_asks(broker: BrokerServer) -> None:
    """A consumer that begins at any of these offsets, or a reset to one, finds what is sent next, and no more lag."""
    queue = {"topic": "T2", "queueId": 0}
    with RemotingSocket(broker.port) as client:
        captured(client, "F60")
        for number in range(3):
            client.send("T2", b"old %d" % number)
        wait_until(lambda: broker.store.max_offset("T2", 0) == 3, "dispatch")
        assert client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T2"}).code == 0
        captured(client, "F60")

        def told() -> tuple[set[str], TopicOffset]:
            asked = [(RequestCode.GET_MIN_OFFSET, queue)]
            asked += [(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, queue | {"timestamp": at}) for at in (0, 1, 1 << 50)]
            answers = [client.ask(code, fields) for code, fields in asked]
            stats = TopicStatsTable.decode(captured(client, "F57", topic="T2").body).offset_table
            return {one.fields["offset"] for one in answers}, stats[MessageQueue("T2", broker.config.name, 0)]

        begins, stats = told()
        assert begins == {"3"}
        assert (stats.min_offset, stats.max_offset) == (3, 3)
        assert client.ask(RequestCode.GET_MAX_OFFSET, queue).fields["offset"] == "3"
        assert client.ask(RequestCode.GET_EARLIEST_MSG_STORETIME, queue).fields["timestamp"] == "-1"
        assert client.send("T2", b"new").fields["queueOffset"] == "3"
        wait_until(lambda: broker.store.max_offset("T2", 0) == 4, "dispatch")
        assert told()[0] == {"3", "4"}  # nothing is stored in the far future yet
        client.subscribe("g", "T2")
        pulled = client.ask(RequestCode.PULL_MESSAGE, pull_fields("g", "T2", 3))
        assert (pulled.code, decode_record(pulled.body).body) == (0, b"new")


def test_all_that_rocketmqs_broker_tells_of_itself(broker: BrokerServer) -> None:
    """F9, F10."""
    with RemotingSocket(broker.port) as client:
        ours = KVTable.decode(captured(client, "F9").body).table
    theirs = KVTable.decode(GOLDEN["F10"].frame.body).table
    assert theirs.keys() - NOT_HERE <= ours.keys()
    for key in ("putTps", "getTransferedTps", "getTransferredTps"):
        assert len(ours[key].split(" ")) == 3
    for key in ("earliestMessageTimeStamp", "pageCacheLockTimeMills", "commitLogDiskRatio"):
        float(ours[key])


def test_access_rules_of_a_file_apply_and_change(tmp_path: Path) -> None:
    """Without a restart, also on connections that are open."""
    file = tmp_path / "plain_acl.yml"
    rules = "accounts:\n- accessKey: alice\n  secretKey: alice-secret\n  defaultTopicPerm: PUB\n"
    file.write_text(rules)
    file.chmod(0o600)
    server = BrokerServer(replace(plain(tmp_path), access=AccessConfig(acl_enable=True, acl_file=file))).start()
    try:
        with RemotingSocket(server.port) as client, RemotingSocket(server.port) as stranger:
            assert "requires an access key" in stranger.send().remark
            client.key = ("alice", "alice-secret")
            assert client.send().code == 0
            assert "needs SUB on topic T" in client.ask(RequestCode.GET_MAX_OFFSET, {"topic": "T", "queueId": 0}).remark
            file.write_text(rules.replace("alice-secret", "other-secret"))
            assert client.is_hung_up
            assert "unknown access key" in stranger.ask(RequestCode.GET_MAX_OFFSET, {"AccessKey": "alice"}).remark
    finally:
        server.stop()
