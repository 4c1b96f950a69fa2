"""Many topics' queues and many groups' offsets in one answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from dledger.access.rules import parse_rules
from dledger.client.security import ClientSecurity
from dledger.errors import CorruptLogError
from rocketstore.broker_grpc import surveys
from rocketstore.pb import broker_pb2 as pb
from rocketstore.state.changes import TopicConfig
from rocketstore.types import BROKER_STATE_TOPIC, SCHEDULE_TOPIC
from tests.unit.rocketstore.broker.harness import Harness, failing

RULES = """\
accounts:
- accessKey: alice
  secretKey: alice-secret
  defaultTopicPerm: PUB|SUB
  topicPerms: [hidden=DENY, written=PUB]
  groupPerms: [g=SUB]
- accessKey: root
  secretKey: root-secret
  admin: true
"""


@pytest.fixture
def broker() -> Iterator[Harness]:
    """A broker with topics of 4, 2 and 3 queues."""
    topics = TopicConfig("T", 4, 4), TopicConfig("less-to-read", 1, 2), TopicConfig("less-to-write", 3, 1, 4)
    with Harness(None, *topics) as harness:
        yield harness


def ranges(broker: Harness, *names: str) -> tuple[dict[str, list[pb.QueueRangeResponse]], int]:
    answer = broker.call("TopicRanges", pb.TopicRangesRequest(topics=names), pb.TopicRangesResponse)
    return {one.topic: list(one.queues) for one in answer.topics}, answer.covered


def offsets(broker: Harness, *names: str) -> tuple[dict[str, list[pb.ConsumerOffset]], int]:
    answer = broker.call("GroupOffsets", pb.GroupOffsetsRequest(groups=names), pb.GroupOffsetsResponse)
    return {one.group: list(one.offsets) for one in answer.groups}, answer.covered


def test_the_ranges_are_those_of_each_queue(broker: Harness) -> None:
    """As asked for one by one; in the order of the queues."""
    broker.send(pb.Message(topic="T", body=b"1", queue_id=2), pb.Message(topic="T", body=b"2", queue_id=2))

    found, _ = ranges(broker, "T")

    one_by_one = [
        broker.call("QueueRange", pb.QueueRequest(topic="T", queue_id=queue), pb.QueueRangeResponse)
        for queue in range(4)
    ]
    assert found["T"] == one_by_one
    assert (found["T"][2].min_offset, found["T"][2].max_offset, found["T"][3].max_offset) == (0, 2, 0)


def test_all_queues_are_told_whatever_they_are_for(broker: Harness) -> None:
    """A topic that is being shrunk, or that nobody may send to, does not make the whole answer fail."""
    found, covered = ranges(broker, "less-to-read", "less-to-write")

    assert {name: len(queues) for name, queues in found.items()} == {"less-to-read": 2, "less-to-write": 3}
    assert covered == 2


def test_unknown_and_hidden_topics_are_left_out_but_covered(broker: Harness) -> None:
    """A topic deleted in the meantime is nobody's fault."""
    broker.state.table[BROKER_STATE_TOPIC] = TopicConfig(BROKER_STATE_TOPIC, 1, 1)

    found, covered = ranges(broker, "gone", BROKER_STATE_TOPIC, "T", "gone too")

    assert list(found) == ["T"]
    assert covered == 4


@pytest.mark.parametrize(("queues_max", "covered"), [(1, 1), (4, 1), (5, 1), (6, 2), (8, 2), (9, 3)])
def test_an_answer_covers_what_its_limit_allows(
    broker: Harness, monkeypatch: pytest.MonkeyPatch, queues_max: int, covered: int
) -> None:
    """From the first name on, at least one, and never more queues than that."""
    monkeypatch.setattr(surveys, "QUEUES_MAX", queues_max)
    names = ("T", "less-to-read", "less-to-write")

    found, told = ranges(broker, *names)

    assert told == covered
    assert tuple(found) == names[:covered]


@pytest.mark.parametrize(("offsets_max", "covered"), [(1, 1), (2, 1), (3, 2), (4, 4)])
def test_offsets_are_covered_in_the_same_way(
    broker: Harness, monkeypatch: pytest.MonkeyPatch, offsets_max: int, covered: int
) -> None:
    """By the number of offsets; a group that is not there has none."""
    monkeypatch.setattr(surveys, "QUEUES_MAX", offsets_max)
    broker.state.committed = {("a", "T", 0): 1, ("a", "T", 3): 2, ("b", "T", 0): 7, ("d", "T", 1): 9}

    found, told = offsets(broker, "a", "b", "d", "gone")

    assert told == covered
    assert list(found) == ["a", "b", "d"][:covered]
    assert found["a"] == [
        pb.ConsumerOffset(topic="T", queue_id=0, offset=1),
        pb.ConsumerOffset(topic="T", queue_id=3, offset=2),
    ]


def test_a_damaged_message_hides_only_its_own_time(broker: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its queue ends is known all the same, and so is everything about other queues and topics."""
    broker.send(pb.Message(topic="T", body=b"1", queue_id=2), pb.Message(topic="less-to-read", body=b"2", queue_id=0))
    whole = broker.store.store_time

    def store_time(topic: str, queue_id: int, offset: int) -> int:
        if topic == "T":
            raise CorruptLogError(Path("log"), 0, "the message does not match its CRC", "")
        return whole(topic, queue_id, offset)

    monkeypatch.setattr(broker.store, "store_time", store_time)

    found, covered = ranges(broker, "T", "less-to-read")

    assert covered == 2
    assert (found["T"][2].max_offset, found["T"][2].last_update_ms) == (1, -1)
    assert found["less-to-read"][0].last_update_ms > 0


def test_nothing_asked_is_nothing_told(broker: Harness) -> None:
    """And covers nothing."""
    assert ranges(broker) == ({}, 0)
    assert offsets(broker) == ({}, 0)


def test_too_many_names_are_refused(broker: Harness) -> None:
    """With the limit."""
    names = ["T"] * (surveys.NAMES_MAX + 1)
    for method, request in (
        ("TopicRanges", pb.TopicRangesRequest(topics=names)),
        ("GroupOffsets", pb.GroupOffsetsRequest(groups=names)),
    ):
        with failing(grpc.StatusCode.INVALID_ARGUMENT, "1,025 names, and at most 1,024 are allowed"):
            broker.call_bytes(method, request.SerializeToString())


@pytest.mark.parametrize(
    ("account", "topics", "groups"),
    [("alice", ["T"], ["g"]), ("root", ["T", "hidden", "written", SCHEDULE_TOPIC], ["g", "other"])],
)
def test_an_account_is_told_what_it_may_read(account: str, topics: list[str], groups: list[str]) -> None:
    """The rest is left out, and covered all the same."""
    there = [TopicConfig(name, 1, 1) for name in ("T", "hidden", "written", SCHEDULE_TOPIC)]
    security = ClientSecurity(access_key=account, secret_key=f"{account}-secret")
    with Harness(None, *there, rules=parse_rules(RULES), security=security) as broker:
        broker.state.committed = {("g", "T", 0): 1, ("other", "T", 0): 1}

        found, covered = ranges(broker, *(one.name for one in there))
        members, covered_groups = offsets(broker, "other", "g")

    assert (list(found), covered) == (topics, 4)
    assert (sorted(members), covered_groups) == (groups, 2)


def test_how_much_is_hidden_is_not_told_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is covered is the same whether a topic or a group that one may not see is there, small, or large."""
    monkeypatch.setattr(surveys, "QUEUES_MAX", 4)
    there = [TopicConfig("T", 1, 1), TopicConfig("hidden", 4, 4), TopicConfig(SCHEDULE_TOPIC, 4, 4)]
    security = ClientSecurity(access_key="alice", secret_key="alice-secret")
    with Harness(None, *there, rules=parse_rules(RULES), security=security) as broker:
        broker.state.committed = {("other", "T", queue): 1 for queue in range(4)} | {("g", "T", 0): 1}

        of_topics = {name: ranges(broker, name, name, "T") for name in ("hidden", "gone", SCHEDULE_TOPIC)}
        of_groups = {name: offsets(broker, name, name, "g") for name in ("other", "gone")}

    assert of_topics["hidden"] == of_topics[SCHEDULE_TOPIC] == of_topics["gone"]
    assert of_groups["other"] == of_groups["gone"]
