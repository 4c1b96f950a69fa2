"""A broker's port of gRPC: who asks is told where it is, and finds there what any language can use."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from dledger.pb import client_pb2
from dledger_cli.local.group import free_ports
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.runtime import RuntimeInfo
from rocketstore.server import BrokerServer
from rocketstore.settings import load_broker_settings
from tests.support.remoting import RemotingSocket
from tests.support.waiting import wait_until

HEALTH = "/grpc.health.v1.Health/Check"
METADATA = "/dledger.v1.LogService/Metadata"
SMALL = {"mappedFileSizeCommitLog": "1m", "maxHashSlotNum": "100", "maxIndexNum": "400", "vipPort": "0"}


def broker(directory: Path, *, member: bool) -> BrokerServer:
    """A plain one, or the only member of a group."""
    listen, peer = free_ports(2)
    settings = {"storePathRootDir": str(directory), "listenPort": str(listen), **SMALL}
    if member:
        settings |= {"enableDLegerCommitLog": "true", "dLegerGroup": "G", "dLegerSelfId": "n0", "warm_bytes": "0"}
        settings |= {"dLegerPeers": f"n0-127.0.0.1:{peer}", "index_segment_bytes": "32000"}
    return BrokerServer(load_broker_settings(None, {}, settings)[0])


def ask(port: int, method: str, request: bytes = b"") -> bytes:
    """A unary call. Raises ``grpc.RpcError``."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            method, request_serializer=None, response_deserializer=None
        )
        return call(request, timeout=60)


@pytest.mark.parametrize("member", [False, True], ids=["plain", "member"])
def test_the_runtime_information_leads_to_health(tmp_path: Path, member: bool) -> None:
    """Over remoting a client asks where gRPC is; the answer is right, for a broker of a group and for a plain one."""
    server = broker(tmp_path, member=member)
    try:
        server.start()
        with RemotingSocket(server.port) as client:
            answer = client.ask(RequestCode.GET_BROKER_RUNTIME_INFO)
        port = RuntimeInfo.decode(answer.body).grpc_port
        assert port == server.grpc_port == server.port + 2
        health = health_pb2.HealthCheckResponse.FromString(ask(port, HEALTH))
        assert health.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        server.stop(graceful=False)


def test_a_members_log_is_served_there_and_tells_the_port(tmp_path: Path) -> None:
    """``dledger.v1`` for any language; a plain broker has no such log."""
    server = broker(tmp_path / "member", member=True)
    try:
        server.start()
        wait_until(lambda: bool(server.view().leader), "it leads itself")
        told = client_pb2.MetadataResponse.FromString(ask(server.grpc_port, METADATA))
        assert (told.node_id, told.is_broker, told.grpc_port) == ("n0", True, server.grpc_port)
    finally:
        server.stop(graceful=False)
    plain = broker(tmp_path / "plain", member=False)
    try:
        plain.start()
        with pytest.raises(grpc.RpcError) as refused:
            ask(plain.grpc_port, METADATA)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    finally:
        plain.stop(graceful=False)
