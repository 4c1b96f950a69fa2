"""Who may call what at a node: every method of its services, for everybody from nobody to an administrator.

The methods are those of the protocol's files: one that is added without a line here fails. The broker's have the same
table in ``tests/unit/rocketstore/broker/test_privileges.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from cluster import certs
from cluster.local.group import free_ports
from dledger.access.guard import AccessGuard
from dledger.access.rules import parse_rules
from dledger.client.security import ChannelMaker, ClientSecurity
from dledger.clock import Clock
from dledger.config import Member, SecurityConfig, ServerConfig
from dledger.pb import client_pb2, raft_pb2
from dledger.rpc import options
from dledger.rpc.clients.server import ClientServer
from dledger.rpc.peers.transport import GrpcTransport
from dledger.types import Boundary, LogIndex, NodeId, Position, Term
from tests.support.certificates import files
from tests.support.fake_node import FakeNode
from tests.support.receiver import RecordingReceiver

TIMEOUT_S: Final = 30
GROUP: Final = "default"
LOG: Final = client_pb2.DESCRIPTOR.services_by_name["LogService"]
RAFT: Final = raft_pb2.DESCRIPTOR.services_by_name["RaftService"]
DENIED: Final = grpc.StatusCode.PERMISSION_DENIED
RULES: Final = """\
accounts:
- accessKey: root
  secretKey: root-secret
  admin: true
- accessKey: bare
  secretKey: bare-secret
- accessKey: grouped
  secretKey: grouped-secret
  topicPerms:
  - another=PUB|SUB
  groupPerms:
  - default=PUB|SUB
- accessKey: writer
  secretKey: writer-secret
  topicPerms:
  - default=PUB
- accessKey: reader
  secretKey: reader-secret
  topicPerms:
  - default=SUB
- accessKey: both
  secretKey: both-secret
  topicPerms:
  - default=PUB|SUB
- accessKey: elsewhere
  secretKey: elsewhere-secret
  whiteRemoteAddress: 192.0.2.7
  topicPerms:
  - default=PUB|SUB
"""
UNKNOWN: Final = {
    "nobody": ClientSecurity(),
    "stranger": ClientSecurity(access_key="mallory", secret_key="mallory-secret"),
    "impostor": ClientSecurity(access_key="root", secret_key="another-secret"),
    "unsigned": ClientSecurity(access_key="elsewhere", secret_key="wrong"),
}
"""They have no account, or cannot prove that it is theirs."""
KNOWN: Final = {
    name: ClientSecurity(access_key=name, secret_key=f"{name}-secret")
    for name in ("bare", "grouped", "writer", "reader", "both", "root")
}
ROLES: Final = UNKNOWN | KNOWN

ANY: Final = frozenset(KNOWN)
WRITERS: Final = frozenset({"writer", "both", "root"})
READERS: Final = frozenset({"reader", "both", "root"})
ADMINS: Final = frozenset({"root"})

OWN_LOG: Final[Mapping[str, frozenset[str]]] = {
    "Append": WRITERS,
    "AppendStream": WRITERS,
    "Producer": WRITERS,
    "Read": READERS,
    "Follow": READERS,
    "FetchLog": READERS,
    "Locate": READERS,
    "BlockDigests": READERS,
    "Metadata": ANY,
    "WatchRole": ANY,
    "TransferLeadership": ADMINS,
}
"""Who may call what at a node whose log is for its clients."""
APPLICATIONS_LOG: Final = {name: ADMINS if allowed == READERS else allowed for name, allowed in OWN_LOG.items()}
"""The same where the log is an application's (a broker's), and so has entries of all its users."""
PEERS: Final = frozenset({"Handshake", "Vote", "Heartbeat", "TakeLeadership", "ReadLog", "ChainCrcs"})
"""What only the member may call that a request says it is from."""


def filled(descriptor: Descriptor) -> Message:
    """A request to the group, with one of each repeated part; between members, from n1 to n0."""
    made = message_factory.GetMessageClass(descriptor)()
    words = {"group": GROUP, "producer": "p", "cluster_id": "c", "sender": "n1", "target": "n0", "client_address": "h"}
    for field in descriptor.fields:
        if field.name in ("header", "last") and field.message_type is not None:
            getattr(made, field.name).CopyFrom(filled(field.message_type))
        elif field.name == "bodies":
            made.bodies.append(b"x")  # type: ignore[attr-defined]  # only known at run time
        elif field.name == "indexes":
            made.indexes.append(0)  # type: ignore[attr-defined]
        elif field.name == "length":
            made.length = 1  # type: ignore[attr-defined]
        elif field.name in words:
            setattr(made, field.name, words[field.name])
    return made


def call(channel: grpc.Channel, service: ServiceDescriptor, name: str) -> grpc.StatusCode:
    """How a call with a valid request ends, or ``OK`` if it is answered."""
    found = service.methods_by_name[name]
    path, request = options.method(service.full_name, name), filled(found.input_type).SerializeToString()
    ended = threading.Event()
    try:
        if found.client_streaming:
            both: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
                path, request_serializer=None, response_deserializer=None
            )
            for _answer in both(_until(ended, request), timeout=TIMEOUT_S):
                break
        elif found.server_streaming:
            stream: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(
                path, request_serializer=None, response_deserializer=None
            )
            for _answer in stream(request, timeout=TIMEOUT_S):
                break
        else:
            unary: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
                path, request_serializer=None, response_deserializer=None
            )
            unary(request, timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    finally:
        ended.set()
    return grpc.StatusCode.OK


def _until(ended: threading.Event, request: bytes) -> Iterator[bytes]:
    yield request
    ended.wait(TIMEOUT_S)


class TransferringNode(FakeNode):
    """It notes what it is asked to do, and who reads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.transfers: list[object] = []

    def submit_transfer(self, target: NodeId | None, done: object) -> None:
        self.transfers.append(target)
        super().submit_transfer(target, done)  # type: ignore[arg-type]  # as it came

    def traces(self) -> tuple[object, ...]:
        """What calls left behind."""
        return len(self.entries), dict(self.producers), len(self.transfers), self.bulk.asked, self.bulk.reads


@contextmanager
def served(*, guarded: bool = True, client_appends: bool = True) -> Iterator[tuple[TransferringNode, str]]:
    """A node with one entry, and its address for clients."""
    node = TransferringNode()
    node.submit_append([b"first"], lambda _result: None)
    guard = AccessGuard(parse_rules(RULES), name="n0", clock=Clock()) if guarded else None
    server = ClientServer(ServerConfig(client_port=0, client_appends=client_appends), node, guard)
    server.start()
    try:
        yield node, server.address
    finally:
        server.close()


@contextmanager
def channel_of(address: str, role: str) -> Iterator[grpc.Channel]:
    """An account's, which knows for whom to sign, if it can learn that."""
    with ChannelMaker(ROLES[role], [address]).open(address) as channel:
        if role != "nobody":  # a stream cannot learn it
            call(channel, LOG, "Metadata")
        yield channel


def test_every_method_has_a_line() -> None:
    """Whoever adds one, or a service, says who may call it."""
    services = {**client_pb2.DESCRIPTOR.services_by_name, **raft_pb2.DESCRIPTOR.services_by_name}
    assert set(services) == {"LogService", "RaftService"}
    assert set(OWN_LOG) == set(APPLICATIONS_LOG) == set(LOG.methods_by_name)
    assert set(PEERS) == set(RAFT.methods_by_name)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("client_appends", [True, False])
def test_each_method_is_for_those_who_may(role: str, client_appends: bool) -> None:
    """Without a valid signature nobody; with one, those whose permissions cover it, and no others: for them nothing is
    done or read. A permission on a consumer group, or on another topic, is none on the log."""
    privileges = OWN_LOG if client_appends else APPLICATIONS_LOG
    with served(client_appends=client_appends) as (node, address), channel_of(address, role) as channel:
        for name, allowed in privileges.items():
            before = node.traces()
            ended = call(channel, LOG, name)
            if role in UNKNOWN:
                assert (name, ended) == (name, grpc.StatusCode.UNAUTHENTICATED)
            elif role not in allowed:
                assert (name, ended) == (name, DENIED)
            else:
                assert (name, ended) == (name, grpc.StatusCode.OK)
                continue
            assert (name, node.traces()) == (name, before)


def test_without_access_control_everybody_may_do_everything() -> None:
    """Whoever can connect is the operator's concern then."""
    with served(guarded=False) as (_, address), grpc.insecure_channel(address) as channel:
        assert {name: call(channel, LOG, name) for name in OWN_LOG} == dict.fromkeys(OWN_LOG, grpc.StatusCode.OK)


@pytest.mark.parametrize("role", ROLES)
def test_a_client_port_serves_no_members_and_describes_itself_to_nobody(role: str) -> None:
    """Not even for an administrator: what is said between members is believed. Health is for all, as monitoring cannot
    sign."""
    health = health_pb2.DESCRIPTOR.services_by_name["Health"]
    reflection = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
    refused = [(RAFT, name) for name in PEERS] + [(reflection, name) for name in reflection.methods_by_name]
    with served() as (_, address), channel_of(address, role) as channel:
        for service, name in refused:
            assert (name, call(channel, service, name)) == (name, grpc.StatusCode.UNIMPLEMENTED)
        for name in ("Check", "Watch"):
            assert (name, call(channel, health, name)) == (name, grpc.StatusCode.OK)


# --- the peer port ----------------------------------------------------------------------------------------------------


class AskedLog:
    """A log that counts what is read of it."""

    begin = Boundary(LogIndex(-1), Term(0), Position(0), 0)
    committed_index = LogIndex(0)

    def __init__(self) -> None:
        self.asked = 0

    def copy_committed(self, position: int, length: int) -> bytes | None:
        self.asked += 1
        return None if position else bytes(length)

    def chain_crc_at(self, index: LogIndex) -> int:
        self.asked += 1
        return int(index)


NOT_SERVED: Final = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION}
CALLERS: Final = ("plaintext", "without-certificate", "other-authority", "client", "n2", "n1")
"""Who says to be member n1."""


def credentials_of(home: Path, caller: str) -> grpc.ChannelCredentials:
    """What somebody shows; all of them trust the group's authority."""
    ca = (home / "ca.crt").read_bytes()
    if caller == "without-certificate":
        return grpc.ssl_channel_credentials(ca)
    shown = files(home / "others", "n1") if caller == "other-authority" else files(home, caller)
    assert shown.cert is not None
    assert shown.key is not None
    return grpc.ssl_channel_credentials(ca, shown.key.read_bytes(), shown.cert.read_bytes())


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of three members and a client, and of another authority."""
    made = tmp_path_factory.mktemp("certificates")
    for directory in (made, made / "others"):
        certs.make_authority(directory)
        for node in ("n0", "n1", "n2"):
            certs.make_node(directory, node)
    certs.make_client(made, "client")
    return made


@pytest.mark.parametrize("caller", CALLERS)
def test_a_peer_port_believes_only_the_member_itself(home: Path, caller: str) -> None:
    """Whatever it is asked. Nobody else votes, beats, hands over, reads or is noted as that member, be it another
    member; and clients find no service of theirs there."""
    own = files(home, "n0")
    config = ServerConfig(
        node_id=NodeId("n0"),
        members=tuple(Member(NodeId(f"n{at}"), "127.0.0.1", port) for at, port in enumerate(free_ports(3))),
        cluster_id="c",
        security=SecurityConfig(tls_cert_path=own.cert, tls_key_path=own.key, tls_trust_cert_path=own.ca),
    )
    log, receiver = AskedLog(), RecordingReceiver()
    transport = GrpcTransport(config, log=log)
    ended: dict[str, grpc.StatusCode] = {}
    try:
        transport.start(receiver)
        address = f"127.0.0.1:{transport.port}"
        secure = caller != "plaintext"
        with (
            grpc.secure_channel(address, credentials_of(home, caller)) if secure else grpc.insecure_channel(address)
        ) as channel:
            for name in PEERS:
                ended[name] = call(channel, RAFT, name)
            for name in OWN_LOG:
                assert call(channel, LOG, name) in NOT_SERVED | {grpc.StatusCode.UNIMPLEMENTED}
        if caller == "n1":
            assert ended == dict.fromkeys(PEERS, grpc.StatusCode.OK)
            assert (len(receiver.requested), len(receiver.received), log.asked) == (2, 1, 2)
            assert NodeId("n1") in transport.client_addresses
        else:
            assert (set(ended.values()) <= NOT_SERVED, ended) == (True, ended)
            assert (receiver.requested, receiver.received, log.asked) == ([], [], 0)
            assert not transport.client_addresses
    finally:
        transport.close()
