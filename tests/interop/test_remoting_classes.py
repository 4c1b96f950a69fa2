"""Frames, bodies and signatures through RocketMQ's own classes, 4.9.7: what we write means the same there, and back."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger.remoting.frame import Frame, HeaderForm, decode, encode, signature
from rocketstore.remoting.body import Body
from rocketstore.remoting.groups import ConsumeOffset, SubscriptionGroupConfig
from rocketstore.remoting.topics import BrokerData, DataVersion, RegisterBrokerBody, TopicConfigData, TopicConfigTable
from tests.fuzz.remoting_shapes import BODIES, frames_of, made
from tests.interop import java

pytestmark = pytest.mark.interop

EXAMPLES = 60
COMMON = "org.apache.rocketmq.common"
CLASSES = {
    "HeartbeatData": f"{COMMON}.protocol.heartbeat.HeartbeatData",
    "SubscriptionData": f"{COMMON}.protocol.heartbeat.SubscriptionData",
    "ConsumerData": f"{COMMON}.protocol.heartbeat.ConsumerData",
    "ProducerData": f"{COMMON}.protocol.heartbeat.ProducerData",
    "CheckClientBody": f"{COMMON}.protocol.body.CheckClientRequestBody",
    "ConsumerIdList": f"{COMMON}.protocol.header.GetConsumerListByGroupResponseBody",
    "LockQueuesBody": f"{COMMON}.protocol.body.LockBatchRequestBody",
    "LockedQueuesBody": f"{COMMON}.protocol.body.LockBatchResponseBody",
    "ClientConnection": f"{COMMON}.protocol.body.Connection",
    "ConsumerConnectionList": f"{COMMON}.protocol.body.ConsumerConnection",
    "ProducerConnectionList": f"{COMMON}.protocol.body.ProducerConnection",
    "ProducerInfo": f"{COMMON}.protocol.body.ProducerInfo",
    "ProcessQueueInfo": f"{COMMON}.protocol.body.ProcessQueueInfo",
    "ConsumerRunningInfo": f"{COMMON}.protocol.body.ConsumerRunningInfo",
    "ProducersByGroup": f"{COMMON}.protocol.body.ProducerTableInfo",
    "MessageQueue": f"{COMMON}.message.MessageQueue",
    "BrokerData": f"{COMMON}.protocol.route.BrokerData",
    "QueueData": f"{COMMON}.protocol.route.QueueData",
    "TopicRouteData": f"{COMMON}.protocol.route.TopicRouteData",
    "ClusterInfo": f"{COMMON}.protocol.body.ClusterInfo",
    "TopicList": f"{COMMON}.protocol.body.TopicList",
    "KVTable": f"{COMMON}.protocol.body.KVTable",
    "DataVersion": f"{COMMON}.DataVersion",
    "TopicConfigData": f"{COMMON}.TopicConfig",
    "TopicConfigTable": f"{COMMON}.protocol.body.TopicConfigSerializeWrapper",
    "RegisterBrokerBody": f"{COMMON}.protocol.body.RegisterBrokerBody",
    "SubscriptionGroupConfig": f"{COMMON}.subscription.SubscriptionGroupConfig",
    "SubscriptionGroupTable": f"{COMMON}.protocol.body.SubscriptionGroupWrapper",
    "GroupList": f"{COMMON}.protocol.body.GroupList",
    "ConsumerOffsetTable": f"{COMMON}.protocol.body.ConsumerOffsetSerializeWrapper",
    "DelayOffsetTable": "org.apache.rocketmq.store.schedule.DelayOffsetSerializeWrapper",
    "CorrectionOffsets": f"{COMMON}.protocol.body.QueryCorrectionOffsetBody",
    "TopicOffset": f"{COMMON}.admin.TopicOffset",
    "TopicStatsTable": f"{COMMON}.admin.TopicStatsTable",
    "ConsumeOffset": f"{COMMON}.admin.OffsetWrapper",
    "ConsumeStats": f"{COMMON}.admin.ConsumeStats",
    "ConsumeStatsList": f"{COMMON}.protocol.body.ConsumeStatsList",
    "ResetOffsetBody": f"{COMMON}.protocol.body.ResetOffsetBody",
    "QueueOffsetForC": f"{COMMON}.message.MessageQueueForC",
    "ResetOffsetBodyForC": f"{COMMON}.protocol.body.ResetOffsetBodyForC",
    "ConsumerStatusBody": f"{COMMON}.protocol.body.GetConsumerStatusBody",
    "QueueTimeSpan": f"{COMMON}.protocol.body.QueueTimeSpan",
    "ConsumeTimeSpans": f"{COMMON}.protocol.body.QueryConsumeTimeSpanBody",
    "BrokerStatsItem": f"{COMMON}.protocol.body.BrokerStatsItem",
    "BrokerStatsData": f"{COMMON}.protocol.body.BrokerStatsData",
    "ConsumeQueueData": f"{COMMON}.protocol.body.ConsumeQueueData",
    "ConsumeQueueBody": f"{COMMON}.protocol.body.QueryConsumeQueueResponseBody",
}
NOT_IN_4_9 = frozenset(
    {
        "TopicConfigList",
        "SubscriptionGroupList",
        "CustomizedRetryPolicy",
        "ExponentialRetryPolicy",
        "GroupRetryPolicy",
    }
)
FIELDS_NOT_IN_4_9: dict[type, frozenset[str]] = {
    TopicConfigData: frozenset({"attributes"}),
    SubscriptionGroupConfig: frozenset({"consume_message_orderly", "group_retry_policy"}),
    ConsumeOffset: frozenset({"pull_offset"}),
    BrokerData: frozenset({"enable_acting_master"}),
}


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    java.build()


def _examples(strategy: st.SearchStrategy[Any], count: int = EXAMPLES) -> list[Any]:
    found: list[Any] = []

    @settings(max_examples=count, database=None, deadline=None, derandomize=True)
    @given(strategy)
    def collect(one: Any) -> None:  # noqa: ANN401  # whatever the strategy makes
        found.append(one)

    collect()
    return found


def _through_java(directory: Path, command: str, lines: Sequence[tuple[str, bytes]]) -> list[bytes]:
    (directory / "in").write_text("".join(f"{kind} {data.hex()}\n" for kind, data in lines))
    java.run_remoting(command, directory)
    return [bytes.fromhex(line) for line in (directory / "out").read_text().splitlines()]


def _unordered(value: object) -> object:
    """Java's sets have neither order nor doubles; only one kind of filter is known there, and no field of 5.x."""
    if dataclasses.is_dataclass(value):
        lost: dict[str, object] = dict.fromkeys(FIELDS_NOT_IN_4_9.get(type(value), ()))
        if isinstance(value, TopicConfigData):
            lost["topic_filter_type"] = None
        return {one.name: _unordered(getattr(value, one.name)) for one in dataclasses.fields(value)} | lost
    if isinstance(value, tuple):
        return sorted({repr(_unordered(one)) for one in value})
    if isinstance(value, Mapping):
        return sorted((str(key), repr(_unordered(one))) for key, one in value.items())
    return value


def test_every_body_has_its_class() -> None:
    """None is left out below."""
    assert set(CLASSES) == set(BODIES) - NOT_IN_4_9


@pytest.mark.parametrize("name", CLASSES)
def test_a_body_means_the_same_to_java(name: str, tmp_path: Path) -> None:
    """It reads ours, and we read what it writes of it: in its own dialect."""
    bodies: list[Body] = _examples(made(BODIES[name]))
    found = _through_java(tmp_path, "bodies", [(CLASSES[name], body.encode()) for body in bodies])
    for body, data in zip(bodies, found, strict=True):
        assert _unordered(BODIES[name].decode(data)) == _unordered(body)


def test_a_compact_registration_means_the_same_to_java(tmp_path: Path) -> None:
    """Both ways."""
    numbers = st.integers(-(1 << 31), (1 << 31) - 1)
    tables = st.dictionaries(
        st.from_regex(re.compile("[%A-Za-z0-9_-]{1,20}"), fullmatch=True), st.tuples(*[numbers] * 3)
    )
    topics = [
        TopicConfigTable(DataVersion(1, 2), {name: TopicConfigData(name, *one) for name, one in table.items()})
        for table in _examples(tables)
    ]
    bodies = [RegisterBrokerBody(table, ("h:1",)) for table in topics]
    found = _through_java(tmp_path, "bodies", [("compact", body.encode_compressed()) for body in bodies])
    assert [RegisterBrokerBody.decode_compressed(data) for data in found] == bodies


@pytest.mark.parametrize("form", HeaderForm)
def test_a_frame_means_the_same_to_java(form: HeaderForm, tmp_path: Path) -> None:
    """Names and values, numbers at their bounds; only that a field's name must not be empty."""
    frames: list[Frame] = _examples(frames_of(form).filter(lambda frame: "" not in frame.fields), 300)
    found = _through_java(tmp_path, "frames", [("-", encode(frame)) for frame in frames])
    assert [decode(memoryview(data)) for data in found] == frames


def test_a_signature_is_java_s(tmp_path: Path) -> None:
    """Of fields in the order of Java's texts."""
    frames: list[Frame] = [frame for frame in _examples(frames_of(HeaderForm.JSON), 200) if frame.fields]
    found = _through_java(tmp_path, "signatures", [("secret", encode(frame)) for frame in frames])
    assert [one.decode() for one in found] == [signature("secret", frame.fields, frame.body) for frame in frames]
