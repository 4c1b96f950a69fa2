"""RocketMQ's messages are in a pool of their own, and reflection finds them there."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2

from rocketstore.grpc.service import SERVICE, GatewayService
from rocketstore.pb import definition_pb2 as pb
from rocketstore.pb.pool import POOL
from tests.unit.rocketstore.grpc.harness import GatewayHarness


def test_another_program_may_register_the_same_names() -> None:
    """RocketMQ's Python client does, in the pool of all: nothing of ours is there."""
    for name in ("Message", "Settings", "SendMessageRequest"):
        with pytest.raises(KeyError):
            descriptor_pool.Default().FindMessageTypeByName(f"apache.rocketmq.v2.{name}")
    assert POOL.FindMessageTypeByName("apache.rocketmq.v2.Message") is pb.Message.DESCRIPTOR


def test_reflection_describes_the_service(broker: GatewayHarness) -> None:
    """For tools such as grpcurl; methods that are served are those that are described."""

    def ask(request: reflection_pb2.ServerReflectionRequest) -> reflection_pb2.ServerReflectionResponse:
        with grpc.insecure_channel(f"127.0.0.1:{broker.server.port}") as channel:
            call: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
                "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", None, None
            )
            answers = list(call(iter([request.SerializeToString()]), timeout=60))
        return reflection_pb2.ServerReflectionResponse.FromString(answers[0])

    named = ask(reflection_pb2.ServerReflectionRequest(list_services="")).list_services_response.service
    assert SERVICE in [one.name for one in named]
    found = ask(reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)).file_descriptor_response
    files = [FileDescriptorProto.FromString(one) for one in found.file_descriptor_proto]
    methods = {method.name for file in files for service in file.service for method in service.method}
    gateway: GatewayService = broker.gateway
    assert methods == set(gateway.grpc_methods())
    unknown = ask(reflection_pb2.ServerReflectionRequest(file_containing_symbol="no.Such"))
    assert unknown.HasField("error_response")
