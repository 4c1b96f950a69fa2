"""Any node tells what role it plays: by ``Metadata``, as a stream, by reflection; and health checks work."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from dledger.pb import client_pb2
from dledger.types import NodeId, Role
from tests.integration.harness import Group
from tests.support.waiting import wait_until

METADATA = "/dledger.v1.LogService/Metadata"
WATCH_ROLE = "/dledger.v1.LogService/WatchRole"


def metadata(group: Group, node: NodeId, group_name: str = "") -> client_pb2.MetadataResponse:
    """Ask one node, with nothing but gRPC and the message types."""
    with grpc.insecure_channel(group.nodes[node].grpc_address) as channel:
        call = channel.unary_unary(
            METADATA,
            request_serializer=client_pb2.MetadataRequest.SerializeToString,
            response_deserializer=client_pb2.MetadataResponse.FromString,
        )
        answer: client_pb2.MetadataResponse = call(client_pb2.MetadataRequest(group=group_name), timeout=60)
        return answer


def test_every_node_tells_role_term_and_leader(group: Group) -> None:
    """One leader, two followers, one term, and a leader address that clients can use, from any node."""
    group.append(10)
    group.wait_converged()
    leader = group.leader()

    answers = {node: metadata(group, node) for node in group.nodes}

    assert {node: one.role for node, one in answers.items()} == {
        node: "LEADER" if node == leader else "FOLLOWER" for node in group.nodes
    }
    assert {(one.term, one.leader_id, one.leader_address) for one in answers.values()} == {
        (answers[leader].term, leader, group.nodes[leader].client_address)
    }
    assert {(one.status.code, one.committed_index, one.begin_index, one.voter) for one in answers.values()} == {
        (200, answers[leader].end_index, 0, True)
    }
    assert [member.id for member in answers[leader].members] == sorted(group.nodes)


def test_leader_tells_how_far_its_followers_are(group: Group) -> None:
    """Watermarks per peer, on the leader only."""
    group.append(10)
    group.wait_converged()
    leader = group.leader()

    def all_caught_up() -> bool:
        answer = metadata(group, leader)
        return [(one.id, one.match_index, one.lag_entries) for one in answer.peers] == [
            (node, answer.end_index, 0) for node in sorted(group.followers(leader))
        ]

    wait_until(all_caught_up, "the leader knows that its followers have everything")
    assert not metadata(group, group.followers(leader)[0]).peers


def test_every_node_learns_every_client_address(group: Group) -> None:
    """A client that knows one node can find all others through it, whoever leads."""
    for node in group.nodes:
        wait_until(
            lambda node=node: all(  # type: ignore[misc]  # the default binds the loop's variable
                member.client_address == group.nodes[NodeId(member.id)].client_address
                for member in metadata(group, node).members
                if member.id in (node, group.leader())
            ),
            f"{node} knows where clients reach the others",
        )


def test_metadata_of_another_group_is_an_error(group: Group) -> None:
    """A client that is at the wrong address is told, not served."""
    answer = metadata(group, group.leader(), "another")

    assert answer.status.code != 200
    assert "another" in answer.status.message


class RoleWatcher:
    """Collects what one node's ``WatchRole`` streams."""

    def __init__(self, address: str) -> None:
        self.changes: list[client_pb2.RoleChange] = []
        self._channel = grpc.insecure_channel(address)
        watch = self._channel.unary_stream(
            WATCH_ROLE,
            request_serializer=client_pb2.WatchRoleRequest.SerializeToString,
            response_deserializer=client_pb2.RoleChange.FromString,
        )
        self._call = watch(client_pb2.WatchRoleRequest())
        self._thread = threading.Thread(target=self._collect)
        self._thread.start()

    def _collect(self) -> None:
        try:
            for change in self._call:
                self.changes.append(change)
        except grpc.RpcError:
            return

    def close(self) -> None:
        self._call.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leaves it untyped
        self._thread.join(60)
        self._channel.close()


@contextmanager
def watching(group: Group, nodes: list[NodeId]) -> Iterator[dict[NodeId, RoleWatcher]]:
    watchers = {node: RoleWatcher(group.nodes[node].grpc_address) for node in nodes}
    try:
        yield watchers
    finally:
        for watcher in watchers.values():
            watcher.close()


def test_watch_role_streams_an_election(group: Group) -> None:
    """First the present role, then every change: the kill of the leader is seen by the survivors, in order."""
    old = group.leader()
    survivors = group.followers(old)
    with watching(group, survivors) as watchers:
        for watcher in watchers.values():
            wait_until(lambda watcher=watcher: bool(watcher.changes), "the present role")  # type: ignore[misc]
        first = {node: watcher.changes[0] for node, watcher in watchers.items()}

        group.kill(old)
        new = group.leader(other_than=old)

        for watcher in watchers.values():
            wait_until(
                lambda watcher=watcher: watcher.changes[-1].leader_id == new,  # type: ignore[misc]
                "the new leader in the stream",
            )
        streams = {node: list(watcher.changes) for node, watcher in watchers.items()}

    assert {(change.role, change.leader_id) for change in first.values()} == {("FOLLOWER", old)}
    assert streams[new][-1].role == Role.LEADER
    for changes in streams.values():
        terms = [change.term for change in changes]
        assert terms == sorted(terms), "terms never go back"
        assert terms[-1] > terms[0]


@pytest.mark.parametrize("which", ["leader", "follower"])
def test_reflection_describes_the_service_and_calls_it(group: Group, which: str) -> None:
    """A client that has no proto file lists, describes and calls, as grpcurl does."""
    leader = group.leader()
    node = leader if which == "leader" else group.followers(leader)[0]
    with grpc.insecure_channel(group.nodes[node].grpc_address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        services = set(database.get_services())
        described = DescriptorPool(database).FindServiceByName("dledger.v1.LogService")
        method = described.FindMethodByName("Metadata")
        call = channel.unary_unary(
            f"/{described.full_name}/{method.name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        answer = MessageToDict(call(GetMessageClass(method.input_type)(), timeout=60), preserving_proto_field_name=True)

    assert {"dledger.v1.LogService", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= services
    assert {one.name for one in described.methods} >= {"Append", "Read", "Follow", "Metadata", "WatchRole"}
    assert answer["node_id"] == node
    assert answer["role"] == ("LEADER" if which == "leader" else "FOLLOWER")
    assert answer["leader_id"] == leader


def test_health_is_serving(group: Group) -> None:
    """The standard health service answers; an unknown service is not found."""
    node = group.nodes[group.leader()]
    with grpc.insecure_channel(node.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        asked = [health_pb2.HealthCheckRequest(service=name) for name in ("", "dledger.v1.LogService")]
        states = {health.Check(one, timeout=60).status for one in asked}
        with pytest.raises(grpc.RpcError) as unknown:
            health.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=60)

    assert states == {health_pb2.HealthCheckResponse.SERVING}
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


def test_client_reads_metadata_through_any_node(group: Group) -> None:
    """The Python client gives the same, typed."""
    with closing(group.client()) as client:
        for node in group.nodes.values():
            assert client.metadata(address=node.client_address).node_id == node.node_id


def test_every_node_tells_for_how_long_it_has_had_its_role(steady: Group) -> None:
    """The time begins anew with a role and with a term, for those who only follow, too."""
    old = steady.leader()
    before = metadata(steady, old)
    wait_until(lambda: metadata(steady, old).role_age_ms > before.role_age_ms, "it grows")
    asked_s = time.monotonic()

    with steady.client() as client:
        client.transfer_leadership(steady.followers(old)[0])

    wait_until(lambda: {metadata(steady, node).term for node in steady.nodes} == {before.term + 1}, "the new term")
    for node in steady.nodes:
        told = metadata(steady, node)
        assert told.HasField("role_age_ms")
        assert 0 <= told.role_age_ms <= (time.monotonic() - asked_s) * 1000 + 1
