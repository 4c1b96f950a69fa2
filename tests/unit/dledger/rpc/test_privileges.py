"""Who may call what at a node: every method of its services, for everybody from nobody to an administrator.

The methods are those of the protocol's files: one that is added without a line here fails.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message import Message as ProtoMessage
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from dledger.access.guard import AccessGuard
from dledger.access.rules import parse_rules
from dledger.client.shared import ClientSecurity, TlsFiles
from dledger.clock import Clock
from dledger.config import Member, SecurityConfig, ServerConfig
from dledger.core.messages import HeartbeatRequest, Message, PushCommit, TakeLeadership, VoteRequest
from dledger.pb import client_pb2
from dledger.rpc import options, tls
from dledger.rpc.peers import codec, frames
from dledger.rpc.peers.frames import FrameKind, Purpose
from dledger.rpc.peers.transport import PeerTransport
from dledger.types import NO_ENTRY, Boundary, LogIndex, NodeId, Position, Term
from dledger_cli import certs
from dledger_cli.local.group import free_ports
from tests.support.certificates import files
from tests.support.fake_node import FakeNode, client_server
from tests.support.grpc_client import open_channel
from tests.support.peer_wire import PeerWire, handshake_frame
from tests.support.receiver import RecordingReceiver
from tests.support.waiting import wait_until

TIMEOUT_S: Final = 120.0
GROUP: Final = "default"
LOG: Final = client_pb2.DESCRIPTOR.services_by_name["LogService"]
N1: Final = NodeId("n1")
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
    "ChangeMembers": ADMINS,
    "Command": WRITERS,
    "Query": READERS,
    "Snapshot": ADMINS,
}
"""Who may call what at a node whose log is for its clients."""
APPLICATIONS_LOG: Final = {name: ADMINS if allowed == READERS else allowed for name, allowed in OWN_LOG.items()}
"""The same where the log is an application's (a broker's), and so has entries of all its users."""


def filled(descriptor: Descriptor) -> ProtoMessage:
    """A request to the group, with one of each repeated part."""
    made = message_factory.GetMessageClass(descriptor)()
    words = {"group": GROUP, "producer": "p"}
    for field in descriptor.fields:
        if field.name in ("bodies", "commands"):
            getattr(made, field.name).append(b"x")
        elif field.name == "change_id":
            made.change_id, made.remove = 1, "n9"  # type: ignore[attr-defined]  # likewise
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
        return (
            len(self.entries),
            dict(self.producers),
            len(self.transfers),
            len(self.changes),
            self.bulk.asked,
            self.bulk.reads,
        )


@contextmanager
def served(*, guarded: bool = True, client_appends: bool = True) -> Iterator[tuple[TransferringNode, str]]:
    """A node with one entry, and its address of gRPC."""
    node = TransferringNode()
    node.submit_append([b"first"], lambda _result: None)
    guard = AccessGuard(parse_rules(RULES), name="n0", clock=Clock()) if guarded else None
    server = client_server(ServerConfig(client_port=0, client_appends=client_appends), node, guard)
    server.start()
    try:
        yield node, f"127.0.0.1:{server.grpc_port}"
    finally:
        server.close()


@contextmanager
def channel_of(address: str, role: str) -> Iterator[grpc.Channel]:
    """An account's, which knows for whom to sign, if it can learn that."""
    with open_channel(address, ROLES[role]) as channel:
        if role != "nobody":  # a stream cannot learn it
            call(channel, LOG, "Metadata")
        yield channel


def test_every_method_has_a_line() -> None:
    """Whoever adds one, or a service, says who may call it."""
    assert set(client_pb2.DESCRIPTOR.services_by_name) == {"LogService"}
    assert set(OWN_LOG) == set(APPLICATIONS_LOG) == set(LOG.methods_by_name)


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
def test_a_client_port_describes_itself_to_nobody(role: str) -> None:
    """Not even to an administrator. Health is for all, as monitoring cannot sign."""
    health = health_pb2.DESCRIPTOR.services_by_name["Health"]
    reflection = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
    with served() as (_, address), channel_of(address, role) as channel:
        for name in reflection.methods_by_name:
            assert (name, call(channel, reflection, name)) == (name, grpc.StatusCode.UNIMPLEMENTED)
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


CALLERS: Final = ("plaintext", "without-certificate", "other-authority", "client", "n2", "n1")
"""Who says to be member n1."""
QUESTIONS: Final[Mapping[FrameKind, tuple[Purpose, Message | bytes]]] = {
    FrameKind.VOTE: (Purpose.CONTROL, VoteRequest(Term(1), NO_ENTRY)),
    FrameKind.HEARTBEAT: (Purpose.CONTROL, HeartbeatRequest(Term(1), client_address="h")),
    FrameKind.TAKE_LEADERSHIP: (Purpose.CONTROL, TakeLeadership(Term(1))),
    FrameKind.PUSH: (Purpose.PUSH, PushCommit(Term(1), 0, LogIndex(0))),
    FrameKind.READ_LOG: (Purpose.LOG, codec.encode_read_log(0, 1)),
    FrameKind.CHAIN_CRCS: (Purpose.LOG, codec.encode_chain_crcs_request([LogIndex(0)])),
}
"""What only the member may say that the handshake names."""


def context_of(home: Path, caller: str) -> ssl.SSLContext | None:
    """What somebody shows; all of them trust the group's authority."""
    if caller == "plaintext":
        return None
    if caller == "without-certificate":
        return tls.client_context(tls.read(TlsFiles(home / "ca.crt")))
    where, name = (home / "others", "n1") if caller == "other-authority" else (home, caller)
    return tls.client_context(tls.read(files(where, name, ca=home / "ca.crt")))


def say(config: ServerConfig, context: ssl.SSLContext | None, kind: FrameKind) -> list[FrameKind]:
    """The kinds of the answers to a handshake as n1 and one frame."""
    purpose, said = QUESTIONS[kind]
    payload = said if isinstance(said, bytes) else codec.encode(said)
    count = 1 if kind is FrameKind.PUSH else 2
    try:
        with PeerWire((config.self_member.host, config.self_member.port), context) as wire:
            wire.link.sendall(handshake_frame(config, N1, purpose) + frames.pack(kind, payload))
            found = [wire.frame() for _ in range(count)]
    except OSError:  # hung up on
        return []
    return [frame[0] for frame in found if frame is not None]


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
    """Whatever it is told. Nobody else votes, beats, hands over, pushes, reads or is noted as that member, not even
    another member."""
    own = files(home, "n0")
    config = ServerConfig(
        node_id=NodeId("n0"),
        members=tuple(Member(NodeId(f"n{at}"), "127.0.0.1", port) for at, port in enumerate(free_ports(3))),
        cluster_id="c",
        security=SecurityConfig(tls_cert_path=own.cert, tls_key_path=own.key, tls_trust_cert_path=own.ca),
    )
    log, receiver = AskedLog(), RecordingReceiver()
    transport = PeerTransport(config, log=log)
    try:
        transport.start(receiver)
        context = context_of(home, caller)
        answers = {kind: say(config, context, kind) for kind in QUESTIONS}
        if caller == "n1":
            wait_until(lambda: len(receiver.received) == 2, "the push, and the request to take leadership")
            assert {FrameKind.HANDSHAKE_ANSWER} == {found[0] for found in answers.values()}
            assert {kind: found[1] for kind, found in answers.items() if kind is not FrameKind.PUSH} == {
                FrameKind.VOTE: FrameKind.VOTE_ANSWER,
                FrameKind.HEARTBEAT: FrameKind.HEARTBEAT_ANSWER,
                FrameKind.TAKE_LEADERSHIP: FrameKind.TAKE_LEADERSHIP_ANSWER,
                FrameKind.READ_LOG: FrameKind.READ_LOG_ANSWER,
                FrameKind.CHAIN_CRCS: FrameKind.CHAIN_CRCS_ANSWER,
            }
            assert (len(receiver.requested), log.asked) == (2, 2)
            assert N1 in transport.client_addresses
        else:
            assert {kind for found in answers.values() for kind in found} <= {FrameKind.REFUSAL}
            assert (receiver.requested, receiver.received, log.asked) == ([], [], 0)
            assert not transport.client_addresses
    finally:
        transport.close()
