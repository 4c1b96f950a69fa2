"""The broker's unary methods, and the leader information in its responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from dledger.client.discovery import ServerReport
from dledger.errors import LeaderHint
from dledger.types import NodeId
from rocketstore.client.aio.errors import BadAnswerError
from rocketstore.pb import broker_pb2 as pb
from rocketstore.types import BrokerRole

SERVICE: Final = "rocketstore.v1.BrokerService"
AnswerT = TypeVar("AnswerT", bound=Message)


@dataclass(frozen=True, slots=True)
class Method(Generic[AnswerT]):
    """A unary method of the broker and the type of its response."""

    name: str
    answer: type[AnswerT]


PULL: Final = Method("Pull", pb.PullResponse)
NEWEST: Final = Method("Newest", pb.NewestResponse)
QUERY_BY_ID: Final = Method("QueryById", pb.RecordsResponse)
QUERY_BY_KEY: Final = Method("QueryByKey", pb.RecordsResponse)
QUEUE_RANGE: Final = Method("QueueRange", pb.QueueRangeResponse)
TOPIC_RANGES: Final = Method("TopicRanges", pb.TopicRangesResponse)
OFFSET_BY_TIME: Final = Method("OffsetByTime", pb.OffsetResponse)
COMMIT_OFFSETS: Final = Method("CommitOffsets", pb.CommitOffsetsResponse)
COMMIT_POSITION: Final = Method("CommitPosition", pb.CommitPositionResponse)
FETCH_OFFSETS: Final = Method("FetchOffsets", pb.FetchOffsetsResponse)
GROUP_OFFSETS: Final = Method("GroupOffsets", pb.GroupOffsetsResponse)
LOCK_QUEUES: Final = Method("LockQueues", pb.LockQueuesResponse)
UNLOCK_QUEUES: Final = Method("UnlockQueues", pb.UnlockQueuesResponse)
SEND_BACK: Final = Method("SendBack", pb.SendBackResponse)
END_TRANSACTION: Final = Method("EndTransaction", pb.EndTransactionResponse)
PUT_TOPIC: Final = Method("PutTopic", pb.PutTopicResponse)
DELETE_TOPIC: Final = Method("DeleteTopic", pb.DeleteTopicResponse)
LIST_TOPICS: Final = Method("ListTopics", pb.ListTopicsResponse)
DELETE_GROUP: Final = Method("DeleteGroup", pb.DeleteGroupResponse)
LIST_GROUPS: Final = Method("ListGroups", pb.ListGroupsResponse)
DELAYED: Final = Method("Delayed", pb.DelayedResponse)
PRODUCER: Final = Method("Producer", pb.ProducerResponse)
STATUS: Final = Method("Status", pb.StatusResponse)


def parse_answer(kind: type[AnswerT], data: bytes, address: str) -> AnswerT:
    """Raises ``BadAnswerError`` for garbage."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise BadAnswerError(
            f"{address} answered {len(data)} bytes that are not a valid {kind.__name__}: {error}"
        ) from None


def is_master(status: pb.StatusResponse) -> bool:
    """Whether the broker accepts writes."""
    return status.broker_role in (BrokerRole.SYNC_MASTER, BrokerRole.ASYNC_MASTER)


def report_of_broker(status: pb.StatusResponse) -> ServerReport:
    """A broker's status as a ``ServerReport``."""
    leader = LeaderHint(NodeId(status.leader), status.leader_address) if status.leader else None
    return ServerReport(status.node_id, is_master(status), status.term, leader, dict(status.members))
