"""Queries, offsets, topics, groups and status over gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import grpc
import pytest

from dledger.config import AccessConfig
from rocketstore.broker_config import BrokerConfig
from rocketstore.index.service import IndexDamagedError
from rocketstore.message.ids import offset_message_id
from rocketstore.message.message import HostAddress, Message
from rocketstore.pb import broker_pb2 as pb
from rocketstore.state.changes import OFFSETS_MAX, TopicConfig
from rocketstore.types import BROKER_STATE_TOPIC, SCHEDULE_TOPIC, BrokerRole, PutMessageStatus, PutResult
from tests.unit.rocketstore.broker.harness import STORE_HOST, Harness, failing
from tests.unit.rocketstore.fakes import head


@pytest.fixture
def broker() -> Iterator[Harness]:
    """A broker with a topic T of 4 queues."""
    with Harness() as harness:
        yield harness


def test_records_are_found_by_key(broker: Harness) -> None:
    """As stored."""
    broker.send(pb.Message(topic="T", body=b"1", properties={"KEYS": "k1 k2"}), pb.Message(topic="T", body=b"2"))

    found = broker.call("QueryByKey", pb.QueryByKeyRequest(topic="T", key="k2"), pb.RecordsResponse)

    assert list(found.records) == [broker.store.log.records[0].record]


def test_a_query_that_a_damaged_index_cannot_answer_may_be_asked_again(
    broker: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another member may answer it, or the same one a little later: no short answer, and no loss of data."""

    def query(*_args: object, **_named: object) -> list[bytes]:
        raise IndexDamagedError("the index is being rebuilt: retry later")

    monkeypatch.setattr(broker.store, "query", query)

    with failing(grpc.StatusCode.UNAVAILABLE, "retry later"):
        broker.call("QueryByKey", pb.QueryByKeyRequest(topic="T", key="k2"), pb.RecordsResponse)


def test_an_id_that_leads_nowhere_finds_nothing(broker: Harness) -> None:
    """And one that is none is refused."""
    nowhere = pb.QueryByIdRequest(message_id="7F00000100002A9F0000000000000400")

    assert not broker.call("QueryById", nowhere, pb.RecordsResponse).records
    with failing(grpc.StatusCode.INVALID_ARGUMENT):
        broker.call("QueryById", pb.QueryByIdRequest(message_id="nonsense"), pb.RecordsResponse)


def test_queries_hide_what_is_of_a_deleted_topic_of_the_same_name(broker: Harness) -> None:
    """By id and by key: who may read the new topic may not have been allowed to read the old one."""
    for _ in range(2):
        broker.send(pb.Message(topic="T", body=b"x", properties={"KEYS": "k"}))
    broker.state.begins["T", 0] = 1
    old, new = (offset_message_id(STORE_HOST, one.head.offset) for one in broker.store.log.records)

    def found(method: str, request: pb.QueryByIdRequest | pb.QueryByKeyRequest) -> int:
        return len(broker.call(method, request, pb.RecordsResponse).records)

    assert [found("QueryById", pb.QueryByIdRequest(message_id=one)) for one in (old, new)] == [0, 1]
    assert found("QueryByKey", pb.QueryByKeyRequest(topic="T", key="k")) == 1


def test_an_id_of_another_broker_shows_no_message_of_this_one(broker: Harness) -> None:
    """Their logs have records at the same places. The refusal says whom to ask."""
    broker.send(pb.Message(topic="T", body=b"x"))
    other = offset_message_id(HostAddress(b"\x0a\0\0\7", 10911), 0)
    broker.view = replace(broker.view, members={"n0": "192.0.2.1:1"})
    with failing(grpc.StatusCode.NOT_FOUND, "is one of the broker at 10.0.0.7:10911: ask that one"):
        broker.call("QueryById", pb.QueryByIdRequest(message_id=other), pb.RecordsResponse)
    for own in (STORE_HOST, HostAddress(b"\xc0\0\x02\1", 1)):
        request = pb.QueryByIdRequest(message_id=offset_message_id(own, 0))
        assert len(broker.call("QueryById", request, pb.RecordsResponse).records) == 1


def test_a_query_without_an_end_finds_what_was_stored_by_a_clock_that_was_ahead(
    broker: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stored all the same, and its key is known."""
    asked: list[int] = []
    query = broker.store.query

    def spied(topic: str, key: str, most: int, begin_ms: int, end_ms: int, **more: object) -> list[bytes]:
        asked.append(end_ms)
        return query(topic, key, most, begin_ms, end_ms, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(broker.store, "query", spied)
    broker.call("QueryByKey", pb.QueryByKeyRequest(topic="T", key="k"), pb.RecordsResponse)
    broker.call("QueryByKey", pb.QueryByKeyRequest(topic="T", key="k", end_ms=7), pb.RecordsResponse)
    assert asked == [1 << 60, 7]


def test_records_of_the_brokers_own_topics_are_hidden(broker: Harness) -> None:
    """Also from whoever guesses their offset."""
    broker.store.put(Message(BROKER_STATE_TOPIC, b"secret"))

    request = pb.QueryByIdRequest(message_id="7F00000100002A9F0000000000000000")
    assert not broker.call("QueryById", request, pb.RecordsResponse).records


def test_a_queues_range_and_offsets_by_time(broker: Harness) -> None:
    """Store time of the newest message; an empty queue is 0 to 0."""
    broker.send(pb.Message(topic="T", body=b"1"), pb.Message(topic="T", body=b"2"))

    found = broker.call("QueueRange", pb.QueueRequest(topic="T"), pb.QueueRangeResponse)
    empty = broker.call("QueueRange", pb.QueueRequest(topic="T", queue_id=1), pb.QueueRangeResponse)
    by_time = broker.call("OffsetByTime", pb.OffsetByTimeRequest(topic="T", timestamp_ms=1), pb.OffsetResponse)

    newest = broker.store.log.records[1].head.store_timestamp
    assert (found.min_offset, found.max_offset, found.last_update_ms) == (0, 2, newest)
    assert (empty.min_offset, empty.max_offset, empty.last_update_ms) == (0, 0, -1)
    assert by_time.offset == 1


def test_offsets_are_committed_and_fetched(broker: Harness) -> None:
    """Per group, in one topic or in all."""
    offsets = [pb.ConsumerOffset(topic="T", queue_id=1, offset=5), pb.ConsumerOffset(topic="U", offset=6)]
    broker.call("CommitOffsets", pb.CommitOffsetsRequest(group="g", offsets=offsets), pb.CommitOffsetsResponse)

    all_topics = broker.call("FetchOffsets", pb.FetchOffsetsRequest(group="g"), pb.FetchOffsetsResponse)
    one_topic = broker.call("FetchOffsets", pb.FetchOffsetsRequest(group="g", topic="U"), pb.FetchOffsetsResponse)

    assert list(all_topics.offsets) == offsets
    assert list(one_topic.offsets) == offsets[1:]
    assert list(broker.call("ListGroups", pb.ListGroupsRequest(), pb.ListGroupsResponse).groups) == ["g"]


def test_offsets_are_not_committed_in_another_incarnation(broker: Harness) -> None:
    """The broker may have lost messages since they were read, and have others in their places."""
    read_in = broker.call("FetchOffsets", pb.FetchOffsetsRequest(group="g"), pb.FetchOffsetsResponse).incarnation
    assert broker.call("Pull", pb.PullRequest(topic="T", group="g"), pb.PullResponse).incarnation == read_in != 0
    request = pb.CommitOffsetsRequest(group="g", offsets=[pb.ConsumerOffset(topic="T", offset=1)], incarnation=read_in)

    broker.store.incarnation += 1
    refused = broker.call("CommitOffsets", request, pb.CommitOffsetsResponse)
    found = broker.call("FetchOffsets", pb.FetchOffsetsRequest(group="g"), pb.FetchOffsetsResponse)
    assert (refused.incarnation, found.incarnation, list(found.offsets)) == (read_in + 1, read_in + 1, [])

    request.incarnation = read_in + 1
    broker.call("CommitOffsets", request, pb.CommitOffsetsResponse)
    assert broker.call("FetchOffsets", pb.FetchOffsetsRequest(group="g"), pb.FetchOffsetsResponse).offsets


def test_topics_are_made_listed_and_deleted(broker: Harness) -> None:
    """What is left out has the broker's defaults; the broker's own topics are neither shown nor touched."""
    broker.state.table[BROKER_STATE_TOPIC] = TopicConfig(BROKER_STATE_TOPIC, 1, 1)
    broker.call("PutTopic", pb.PutTopicRequest(topic=pb.Topic(name="New", write_queues=2)), pb.PutTopicResponse)

    listed = broker.call("ListTopics", pb.ListTopicsRequest(), pb.ListTopicsResponse).topics
    broker.call("DeleteTopic", pb.DeleteTopicRequest(name="T"), pb.DeleteTopicResponse)

    assert [(one.name, one.read_queues, one.write_queues, one.permission) for one in listed] == [
        ("T", 4, 4, 6),
        ("New", 8, 2, 6),
    ]
    assert set(broker.state.table) == {"New", BROKER_STATE_TOPIC}
    with failing(grpc.StatusCode.NOT_FOUND):
        broker.call("DeleteTopic", pb.DeleteTopicRequest(name="T"), pb.DeleteTopicResponse)
    for name in (SCHEDULE_TOPIC, BROKER_STATE_TOPIC, "../escape", ""):
        with failing(grpc.StatusCode.INVALID_ARGUMENT):
            broker.call("PutTopic", pb.PutTopicRequest(topic=pb.Topic(name=name)), pb.PutTopicResponse)
        with failing(grpc.StatusCode.INVALID_ARGUMENT):
            broker.call("DeleteTopic", pb.DeleteTopicRequest(name=name), pb.DeleteTopicResponse)


@pytest.mark.parametrize(("given", "kept"), [({}, 6), ({"permission": 0}, 0), ({"permission": 4}, 4)])
def test_no_permission_differs_from_none_given(broker: Harness, given: dict[str, int], kept: int) -> None:
    """A topic that nobody may use is possible; without a word, it gets what the broker allows."""
    broker.call("PutTopic", pb.PutTopicRequest(topic=pb.Topic(name="P", **given)), pb.PutTopicResponse)

    assert broker.state.table["P"].permission == kept


def test_groups_are_deleted_with_their_offsets(broker: Harness) -> None:
    """One that is not there is told."""
    broker.state.committed = {("g", "T", 0): 1, ("h", "T", 0): 2}

    broker.call("DeleteGroup", pb.DeleteGroupRequest(name="g"), pb.DeleteGroupResponse)

    assert broker.state.committed == {("h", "T", 0): 2}
    with failing(grpc.StatusCode.NOT_FOUND, "group 'g' does not exist"):
        broker.call("DeleteGroup", pb.DeleteGroupRequest(name="g"), pb.DeleteGroupResponse)


def test_one_client_makes_a_share_of_all_groups_only() -> None:
    """Those that are gone count no longer, and those that are there may be committed to."""
    with Harness(BrokerConfig(groups_max=4, access=AccessConfig(account_share_percent=50))) as broker:
        for group in ("a", "b"):
            offset = pb.ConsumerOffset(topic="T", offset=1)
            commit = pb.CommitOffsetsRequest(group=group, offsets=[offset])
            broker.call("CommitOffsets", commit, pb.CommitOffsetsResponse)
        more = pb.CommitOffsetsRequest(group="c", offsets=[offset])

        with failing(grpc.StatusCode.INVALID_ARGUMENT, "has made 2 groups since this broker started"):
            broker.call("CommitOffsets", more, pb.CommitOffsetsResponse)
        broker.call("CommitOffsets", commit, pb.CommitOffsetsResponse)
        broker.call("DeleteGroup", pb.DeleteGroupRequest(name="a"), pb.DeleteGroupResponse)
        broker.call("CommitOffsets", more, pb.CommitOffsetsResponse)


def test_one_client_makes_a_share_of_all_queues_by_sending() -> None:
    """Counted by queues; who makes topics by name is not held to it."""
    access = AccessConfig(account_share_percent=50)
    with Harness(BrokerConfig(queues_max=32, default_topic_queue_nums=8, access=access)) as broker:
        made = broker.send(*(pb.Message(topic=name, body=b"x") for name in ("A", "B")))
        refused = broker.send(pb.Message(topic="C", body=b"x"))
        broker.call("PutTopic", pb.PutTopicRequest(topic=pb.Topic(name="C")), pb.PutTopicResponse)

        assert [one.status for one in made] == ["PUT_OK", "PUT_OK"]
        assert (refused[0].status, refused[0].outcome) == ("MESSAGE_ILLEGAL", "not_applied")
        assert "has made 16 queues since this broker started" in refused[0].reason
        assert [one.status for one in broker.send(pb.Message(topic="C", body=b"x"))] == ["PUT_OK"]


def test_a_slave_refuses_changes_and_names_the_master(broker: Harness) -> None:
    """UNAVAILABLE with the outcome and the leader in the trailing metadata."""
    broker.become(BrokerRole.SLAVE)

    for method, request in (
        ("CommitOffsets", pb.CommitOffsetsRequest(group="g")),
        ("PutTopic", pb.PutTopicRequest(topic=pb.Topic(name="New"))),
        ("DeleteTopic", pb.DeleteTopicRequest(name="T")),
        ("DeleteGroup", pb.DeleteGroupRequest(name="g")),
    ):
        with failing(grpc.StatusCode.UNAVAILABLE, "is a slave") as metadata:
            broker.call(method, request, pb.PutTopicResponse)
        assert (metadata["outcome"], metadata["leader"]) == ("not_applied", "host:1")


def test_a_change_of_unknown_outcome_says_so(broker: Harness) -> None:
    """A quorum did not answer in time."""
    broker.state.refusal = PutResult(PutMessageStatus.OS_PAGECACHE_BUSY, outcome="unknown", reason="no quorum")

    with failing(grpc.StatusCode.UNAVAILABLE, "no quorum") as metadata:
        broker.call("CommitOffsets", pb.CommitOffsetsRequest(group="g"), pb.CommitOffsetsResponse)

    assert metadata["outcome"] == "unknown"


def test_the_status_says_who_leads_and_how_far_everything_is(broker: Harness) -> None:
    """What clients need to find the master, and people to see that all is well."""
    broker.store.stats.dispatched([head(number, store_ms=broker.store.stats.boot_ms) for number in range(3)], 0)

    status = broker.call("Status", pb.StatusRequest(), pb.StatusResponse)

    assert (status.broker_role, status.raft_role, status.term) == ("SYNC_MASTER", "LEADER", 3)
    assert (status.leader, status.leader_address) == ("n0", "host:1")
    assert dict(status.members) == {"n0": "host:1", "n1": ""}
    assert (status.min_offset, status.max_offset, status.end_offset) == (0, 100, 120)
    assert (status.dispatch_behind_bytes, status.disk_ratio, status.put_total) == (7, 0.25, 3)
    assert status.runtime["brokerStateOffset"] == "1,1"
    assert status.runtime["pullsWaiting"] == "0"


@pytest.mark.parametrize(
    "method",
    [
        "Pull",
        "QueryById",
        "QueryByKey",
        "QueueRange",
        "TopicRanges",
        "Newest",
        "GroupOffsets",
        "CommitOffsets",
        "PutTopic",
        "DeleteTopic",
        "ListTopics",
        "Status",
    ],
)
def test_garbage_is_refused_everywhere(broker: Harness, method: str) -> None:
    """INVALID_ARGUMENT, and the broker goes on."""
    with failing(grpc.StatusCode.INVALID_ARGUMENT):
        broker.call_bytes(method, b"\xff\xff\xff")


# --- a place of the log as offsets ----------------------------------------------------------------------------------


def commit_position(broker: Harness, group: str = "g", **request: object) -> pb.CommitPositionResponse:
    """Of group g."""
    wanted = pb.CommitPositionRequest(group=group, **request)  # type: ignore[arg-type]  # by name
    return broker.call("CommitPosition", wanted, pb.CommitPositionResponse)


def test_a_place_of_the_log_is_committed_as_an_offset_of_every_queue(broker: Harness) -> None:
    """In each queue, the messages whose records begin before that place are consumed; the broker's own are passed."""
    broker.send(*(pb.Message(topic="T", body=b"%d" % number, queue_id=number % 3) for number in range(9)))
    broker.store.put(Message(BROKER_STATE_TOPIC, b"hidden"))
    heads = [one.head for one in broker.store.log.records]

    answer = commit_position(broker, position=heads[5].offset)

    assert {one.queue_id: one.offset for one in answer.offsets} == {0: 2, 1: 2, 2: 1}
    assert broker.state.committed == {("g", "T", 0): 2, ("g", "T", 1): 2, ("g", "T", 2): 1}
    assert answer.position == heads[5].offset


def test_a_place_inside_a_record_counts_what_began_before_it(broker: Harness) -> None:
    """So any position will do."""
    broker.send(*(pb.Message(topic="T", body=b"%d" % number, queue_id=0) for number in range(3)))

    answer = commit_position(broker, position=broker.store.log.records[1].head.offset + 1)

    assert [one.offset for one in answer.offsets] == [2]


def test_only_the_topics_named_are_committed(broker: Harness) -> None:
    """An unknown one is refused, and nothing committed."""
    broker.state.table["U"] = TopicConfig("U", 1, 1)
    broker.send(pb.Message(topic="T", queue_id=0, body=b"1"), pb.Message(topic="U", queue_id=0, body=b"2"))

    commit_position(broker, position=1 << 40, topics=["U"])

    assert broker.state.committed == {("g", "U", 0): 1}
    with failing(grpc.StatusCode.NOT_FOUND, "nowhere"):
        commit_position(broker, position=1 << 40, topics=["T", "nowhere"])
    assert broker.state.committed == {("g", "U", 0): 1}


@pytest.mark.parametrize("before", [{"position": -1}, {"position": -(1 << 63)}, {"index": -1}])
def test_a_negative_place_is_refused(broker: Harness, before: dict[str, int]) -> None:
    """It is a mistake, and not the log's begin."""
    with failing(grpc.StatusCode.INVALID_ARGUMENT, "must not be negative"):
        commit_position(broker, "g", **before)


def test_what_is_not_in_the_queues_yet_is_left_for_later(broker: Harness) -> None:
    """The place that was committed is told; an offset beyond a queue's end would be refused, or skip messages."""
    broker.store.dispatched_to = 2
    broker.send(*(pb.Message(topic="T", body=b"%d" % number, queue_id=0) for number in range(4)))

    answer = commit_position(broker, position=1 << 40)

    assert [one.offset for one in answer.offsets] == [2]
    assert answer.position == broker.store.log.records[2].head.offset


def test_only_what_went_forward_is_written(broker: Harness) -> None:
    """Each change is an append to the log; a stream commits every few seconds."""
    broker.send(pb.Message(topic="T", queue_id=0, body=b"1"), pb.Message(topic="T", queue_id=1, body=b"2"))
    commit_position(broker, position=broker.store.log.records[1].head.offset)
    assert broker.state.committed == {("g", "T", 0): 1, ("g", "T", 1): 0}
    broker.state.refusal = PutResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, outcome="not_applied", reason="no")

    commit_position(broker, position=0)
    commit_position(broker, position=broker.store.log.records[1].head.offset)
    with failing(grpc.StatusCode.UNAVAILABLE):
        commit_position(broker, position=1 << 40)


def test_many_queues_are_committed_in_parts(broker: Harness) -> None:
    """One change of the state holds ``OFFSETS_MAX`` offsets at most."""
    broker.state.table["T"] = TopicConfig("T", 1024, 1024)
    broker.send(*(pb.Message(topic="T", queue_id=number, body=b"x") for number in range(1024)))

    answer = commit_position(broker, position=1 << 40)

    assert len(answer.offsets) == 1024
    assert len(broker.state.committed) == 1024
    assert broker.state.largest_commit <= OFFSETS_MAX


def test_a_deleted_topics_messages_are_behind_the_new_ones_begin(broker: Harness) -> None:
    """A topic that was made anew begins where the old one ended."""
    broker.send(*(pb.Message(topic="T", body=b"%d" % number, queue_id=0) for number in range(3)))
    broker.state.begins["T", 0] = 2

    answer = commit_position(broker, position=0)

    assert [one.offset for one in answer.offsets] == [2]


def test_a_place_must_be_given_and_be_of_this_log(broker: Harness) -> None:
    """A plain broker's log has no indexes; a slave commits nothing."""
    with failing(grpc.StatusCode.INVALID_ARGUMENT, "index or the position"):
        commit_position(broker)
    with failing(grpc.StatusCode.INVALID_ARGUMENT, "plain"):
        commit_position(broker, index=3)
    broker.become(BrokerRole.SLAVE)
    with failing(grpc.StatusCode.UNAVAILABLE, "is a slave"):
        commit_position(broker, position=3)
