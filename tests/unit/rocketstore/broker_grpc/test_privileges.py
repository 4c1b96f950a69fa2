"""Who may call what: every method of the gRPC services, for everybody from nobody to an administrator.

The codes of RocketMQ's protocol have the same table in ``broker/remoting/test_access.py``. A method that is added
without a line here fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Final

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message as Wire

from dledger.access.rules import parse_rules
from dledger.client.security import ClientSecurity
from rocketstore.broker_grpc.codec import SERVICE
from rocketstore.pb import broker_pb2 as pb
from rocketstore.state.changes import TopicConfig
from tests.support.grpc_client import open_channel
from tests.unit.rocketstore.broker.harness import Harness

RULES = """\
accounts:
- accessKey: root
  secretKey: root-secret
  admin: true
- accessKey: bare
  secretKey: bare-secret
- accessKey: topical
  secretKey: topical-secret
  topicPerms:
  - T=PUB|SUB
- accessKey: alice
  secretKey: alice-secret
  topicPerms:
  - T=PUB|SUB
  groupPerms:
  - g=SUB
"""
TIMEOUT_S: Final = 30
ROLES: Final = {
    "nobody": ClientSecurity(),
    "stranger": ClientSecurity(access_key="mallory", secret_key="mallory-secret"),
    "impostor": ClientSecurity(access_key="root", secret_key="another-secret"),
    "bare": ClientSecurity(access_key="bare", secret_key="bare-secret"),
    "topical": ClientSecurity(access_key="topical", secret_key="topical-secret"),
    "alice": ClientSecurity(access_key="alice", secret_key="alice-secret"),
    "root": ClientSecurity(access_key="root", secret_key="root-secret"),
}


class Least(Enum):
    """The least of the accounts that may call a method with topic T and group g."""

    ACCOUNT = ("bare", "topical", "alice", "root")
    """Each message, record and name is checked by itself, or nothing is revealed."""
    TOPIC = ("topical", "alice", "root")
    GROUP = ("alice", "root")
    ADMIN = ("root",)


PRIVILEGES: Final = {
    "EndTransaction": Least.ACCOUNT,
    "GroupOffsets": Least.ACCOUNT,
    "ListGroups": Least.ACCOUNT,
    "ListTopics": Least.ACCOUNT,
    "Producer": Least.ACCOUNT,
    "ProducerMembership": Least.ACCOUNT,
    "QueryById": Least.ACCOUNT,
    "Send": Least.ACCOUNT,
    "SendStream": Least.ACCOUNT,
    "Status": Least.ACCOUNT,
    "TopicRanges": Least.ACCOUNT,
    "Newest": Least.TOPIC,
    "OffsetByTime": Least.TOPIC,
    "QueryByKey": Least.TOPIC,
    "QueueRange": Least.TOPIC,
    "CommitOffsets": Least.GROUP,
    "CommitPosition": Least.GROUP,
    "FetchOffsets": Least.GROUP,
    "LockQueues": Least.GROUP,
    "Membership": Least.GROUP,
    "Pull": Least.GROUP,
    "PullStream": Least.GROUP,
    "SendBack": Least.GROUP,
    "UnlockQueues": Least.GROUP,
    "Delayed": Least.ADMIN,
    "DeleteGroup": Least.ADMIN,
    "DeleteTopic": Least.ADMIN,
    "PutTopic": Least.ADMIN,
}


def filled(descriptor: Descriptor, depth: int = 0) -> Wire:
    """A request about topic T and group g, with one of each repeated part."""
    made = message_factory.GetMessageClass(descriptor)()
    for field in descriptor.fields:
        repeated, kind = field.is_repeated, field.message_type
        if kind is not None and not kind.GetOptions().map_entry and depth < 4:
            part = filled(kind, depth + 1)
            (getattr(made, field.name).add() if repeated else getattr(made, field.name)).CopyFrom(part)
        elif field.type == field.TYPE_STRING:
            is_topic = "topic" in field.name or (field.name == "name" and "Topic" in descriptor.name)
            text = "T" if is_topic else "g"
            if repeated:
                getattr(made, field.name).append(text)
            else:
                setattr(made, field.name, text)
    return made


@pytest.fixture(scope="module")
def broker() -> Iterator[Harness]:
    """A guarded one, with the topic T."""
    with Harness(None, TopicConfig("T", 4, 4), rules=parse_rules(RULES), security=ROLES["root"]) as made:
        yield made


def call_once(channel: grpc.Channel, method: str, request: bytes) -> None:
    """A unary call; raises ``RpcError``."""
    unary: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
        f"/{SERVICE}/{method}", request_serializer=None, response_deserializer=None
    )
    unary(request, timeout=TIMEOUT_S)


def outcome(broker: Harness, method: str, role: str) -> grpc.StatusCode:
    """How a call ends; ``OK`` also if the method only finds something wrong with the request."""
    found = pb.DESCRIPTOR.services_by_name["BrokerService"].methods_by_name[method]
    request = filled(found.input_type).SerializeToString()
    channel = open_channel(broker.address, ROLES[role])
    try:
        with channel:
            if not found.client_streaming:
                call_once(channel, method, request)
                return grpc.StatusCode.OK
            if role != "nobody":
                call_once(channel, "Status", b"")  # a stream cannot learn for whom to sign
            stream: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
                f"/{SERVICE}/{method}", request_serializer=None, response_deserializer=None
            )
            for _answer in stream(iter([request]), timeout=TIMEOUT_S):
                break
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_every_method_has_a_line() -> None:
    """Whoever adds one says who may call it."""
    assert set(PRIVILEGES) == set(pb.DESCRIPTOR.services_by_name["BrokerService"].methods_by_name)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("method", sorted(PRIVILEGES))
def test_each_method_is_for_those_who_may(broker: Harness, method: str, role: str) -> None:
    """Without a valid signature nobody; with one, those whose permissions cover it, and no others.

    And whoever may do nothing with the topic changes nothing, however the call ends.
    """

    def stored() -> tuple[object, ...]:
        return len(broker.store.log.records), dict(broker.state.table), dict(broker.state.committed)

    before = stored()
    ended = outcome(broker, method, role)
    if role not in ("topical", "alice", "root"):
        assert stored() == before
    if role in ("nobody", "stranger", "impostor"):
        assert ended is grpc.StatusCode.UNAUTHENTICATED
    else:
        assert (ended is not grpc.StatusCode.PERMISSION_DENIED) == (role in PRIVILEGES[method].value), ended
        assert ended is not grpc.StatusCode.UNAUTHENTICATED
