"""A broker's port for gRPC and for RocketMQ's remoting protocol, with and without TLS."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import cast

import grpc
import pytest

from cluster import certs
from cluster.local.group import free_ports
from dledger.errors import ConfigError
from dledger.rpc.clients import connections
from rocketstore.broker_config import BrokerConfig
from rocketstore.broker_grpc.codec import SERVICE
from rocketstore.message.record import decode_record
from rocketstore.pb import broker_pb2 as pb
from rocketstore.server import BrokerServer
from rocketstore.settings import load_broker_settings
from tests.support.certificates import files
from tests.support.grpc_client import channel_credentials
from tests.support.http2 import PREFACE, Http2Link
from tests.support.waiting import wait_until

TIMEOUT_S = 30
FRAME = b"\0\0\0\x0etwelve bytes!!"
GRPC_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]


class Echo(asyncio.Protocol):
    """Gives back what comes, and notes from whom."""

    def __init__(self, seen: list[tuple[str, int]]) -> None:
        self._seen = seen

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's classes are not asyncio's
        self._seen.append(transport.get_extra_info("peername")[:2])

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


class Served:
    """A broker, and the remoting connections that it was handed."""

    def __init__(self, server: BrokerServer, seen: list[tuple[str, int]], directory: Path) -> None:
        self.server = server
        self.seen = seen
        self._directory = directory

    def connect(self, port: int = 0, host: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection(
            ("127.0.0.1", port or self.server.port), timeout=TIMEOUT_S, source_address=(host, 0)
        )

    def remoting(self, port: int = 0) -> bool:
        """Whether a plain remoting connection is served, rather than hung up on."""
        with self.connect(port) as link:
            return echoes(link)

    def sealed(self, *protocols: str, name: str = "client") -> bool:
        """The same with TLS."""
        try:
            with self.connect() as link, self.seal(link, *protocols, name=name) as stream:
                return echoes(stream)
        except (ssl.SSLError, ConnectionError):
            return False

    def seal(self, link: socket.socket, *protocols: str, name: str = "client") -> ssl.SSLSocket:
        """A connection's TLS."""
        context = ssl.create_default_context(cafile=str(self._directory / "ca.crt"))
        if name:
            pair = files(self._directory, name)
            context.load_cert_chain(str(pair.cert), str(pair.key))
        if protocols:
            context.set_alpn_protocols(list(protocols))
        return context.wrap_socket(link, server_hostname="127.0.0.1")

    def channel(self, port: int = 0, *, secured: bool = False) -> grpc.Channel:
        address = f"127.0.0.1:{port or self.server.port}"
        if not secured:
            return grpc.insecure_channel(address, options=GRPC_OPTIONS)
        credentials = channel_credentials(files(self._directory, "client"))
        return grpc.secure_channel(address, credentials, options=GRPC_OPTIONS)

    def send(self, channel: grpc.Channel) -> None:
        call(channel, "Send", pb.SendRequest(messages=[pb.Message(topic="T", body=b"x")]).SerializeToString())


def echoes(link: socket.socket) -> bool:
    try:
        link.sendall(FRAME)
        received = b""
        while len(received) < len(FRAME) and (part := link.recv(100)):
            received += part
    except ConnectionError:
        return False
    assert received in (b"", FRAME)
    return received == FRAME


def call(channel: grpc.Channel, method: str, request: bytes) -> bytes:
    unary: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
        f"/{SERVICE}/{method}", request_serializer=None, response_deserializer=None
    )
    return unary(request, timeout=TIMEOUT_S)


@contextmanager
def serving(
    root: Path, settings: Mapping[str, str] | None = None, *, secured: bool = False, remoting: bool = True
) -> Iterator[Served]:
    """A plain broker on a free port."""
    certificates = root / "certs"
    flags = {
        "storePathRootDir": str(root / "store"),
        "listenPort": "0",
        "mappedFileSizeCommitLog": "1m",
        "mappedFileSizeConsumeQueue": "2000",
        "maxHashSlotNum": "100",
        "maxIndexNum": "400",
    }
    if secured:
        certs.make_authority(certificates)
        certs.make_node(certificates, "n0")
        certs.make_client(certificates, "client")
        flags["tls_cert_path"], flags["tls_key_path"] = str(certificates / "n0.crt"), str(certificates / "n0.key")
        flags["tls_trust_cert_path"] = str(certificates / "ca.crt")
    config, _ = load_broker_settings(None, {}, flags | dict(settings or {}))
    seen: list[tuple[str, int]] = []
    server = BrokerServer(config, remoting=(lambda: Echo(seen)) if remoting else False)
    try:
        server.start()
        yield Served(server, seen, certificates)
    finally:
        server.stop()


def test_both_protocols_are_served_at_one_port(tmp_path: Path) -> None:
    """Whoever speaks remoting is handed over with the socket; the others are gRPC's. Anything else is hung up on."""
    with serving(tmp_path) as served:
        assert served.remoting()
        assert served.seen[0][0] == "127.0.0.1"
        with served.channel() as channel:
            served.send(channel)
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"PRI", b"PRI * HTTP/1.0\r\n", b"\x16\x03\x01\0\0", b"\xff"):
            with served.connect() as link:
                link.sendall(garbage)
                link.shutdown(socket.SHUT_WR)
                assert link.recv(1) == b"", garbage
        assert len(served.seen) == 1


def test_messages_are_born_where_their_producer_is(tmp_path: Path) -> None:
    """Not at the relay: what a record says is who connected to the broker."""
    with serving(tmp_path) as served, Http2Link("127.0.0.1", served.server.port) as _, served.channel() as channel:
        served.send(channel)

        def pulled() -> bytes:
            request = pb.PullRequest(topic="T", max_messages=1, wait_ms=1000)
            answer = pb.PullResponse.FromString(call(channel, "Pull", request.SerializeToString()))
            return answer.records

        wait_until(lambda: bool(pulled()), "it is there", TIMEOUT_S)
        born = decode_record(pulled()).born_host
        known = {one.place for one in connections.links_to(frozenset({served.server.port}))}
        assert (".".join(map(str, born.ip)), born.port) in known


def test_limits_of_connections_hold_for_those_that_are_relayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one address no more than its share stay; remoting connections outlive idle ones."""
    monkeypatch.setattr(connections, "GRACE_S", 0.1)
    monkeypatch.setattr(connections, "LOOK_INTERVAL_S", 0.1)
    with serving(tmp_path, {"connections_max": "8"}) as served, ExitStack() as held:
        busy = held.enter_context(served.connect())
        assert echoes(busy)
        links = [held.enter_context(Http2Link("127.0.0.1", served.server.port)) for _ in range(14)]
        for link in links:
            link.begin()
        wait_until(lambda: sum(one.is_closed() for one in links) >= 9, "idle ones are hung up on", TIMEOUT_S)
        assert echoes(busy)
        with served.channel() as channel:
            served.send(channel)


def test_without_remoting_its_clients_are_told_nothing_but_the_log_is_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A line per reason, however many come."""
    with caplog.at_level(logging.WARNING), serving(tmp_path, remoting=False) as served:
        assert not any(served.remoting() for _ in range(3))
    (line,) = (one.getMessage() for one in caplog.records if "remoting" in one.getMessage())
    assert line == "a remoting connection is refused: this broker does not speak that protocol"


@pytest.mark.parametrize(
    ("mode", "plain", "sealed"),
    [("", False, True), ("enforcing", False, True), ("permissive", True, True), ("disabled", True, False)],
)
def test_remoting_uses_tls_as_it_was_told(tmp_path: Path, mode: str, plain: bool, sealed: bool) -> None:
    """RocketMQ's ``tls.server.mode``; with certificates and without a word, TLS it is. gRPC's is not concerned."""
    settings = {"tls.server.mode": mode} if mode else {}
    with serving(tmp_path, settings, secured=True) as served:
        assert served.remoting() is plain
        assert served.sealed() is sealed
        assert not served.sealed(name=""), "clients must show a certificate"
        assert not served.sealed("http/1.1"), "nobody speaks that"
        with served.channel(secured=True) as channel:
            served.send(channel)
        with served.channel() as channel, pytest.raises(grpc.RpcError):
            served.send(channel)


def test_tls_is_not_taken_where_there_is_none(tmp_path: Path) -> None:
    """Remoting is hung up on; gRPC clients hear in the clear that there is none, as before."""
    with serving(tmp_path) as served:
        hello = b"\x16\x03\x01\0\x2d\x01\0\0\x29\x03\x03" + bytes(32) + b"\0\0\2\x13\x01\1\0"
        with served.connect() as link:
            link.sendall(hello)
            assert link.recv(1) == b""
        certs.make_authority(tmp_path / "certs")
        certs.make_client(tmp_path / "certs", "client")
        with served.channel(secured=True) as channel, pytest.raises(grpc.RpcError) as caught:
            served.send(channel)
        assert "WRONG_VERSION_NUMBER" in str(caught.value.details())


def test_clients_need_no_certificate_if_that_was_said(tmp_path: Path) -> None:
    """One setting for gRPC and remoting."""
    with serving(tmp_path, {"tls_client_auth": "none"}, secured=True) as served:
        assert served.sealed(name="")


def test_new_certificates_count_for_new_connections(tmp_path: Path) -> None:
    """Nothing is restarted; whoever is connected stays."""
    with serving(tmp_path, secured=True) as served:
        context = ssl.create_default_context(cafile=str(tmp_path / "certs" / "ca.crt"))
        pair = files(tmp_path / "certs", "client")
        context.load_cert_chain(str(pair.cert), str(pair.key))

        def shown(link: ssl.SSLSocket) -> bytes:
            return link.getpeercert(binary_form=True) or b""

        with context.wrap_socket(served.connect(), server_hostname="127.0.0.1") as before:
            certs.renew(tmp_path / "certs", "n0", days=30, new_key=True)
            with context.wrap_socket(served.connect(), server_hostname="127.0.0.1") as after:
                assert shown(before) != shown(after)
                assert echoes(before)
                assert echoes(after)


@pytest.mark.parametrize(
    "said", [b"\x16\x03", b"\x16\x03\x01\x02\0" + b"\x01\0\1\xfc" + bytes(100)], ids=["two bytes", "half"]
)
def test_half_a_tls_hello_is_ended(tmp_path: Path, said: bytes) -> None:
    """Within the time that a handshake has."""
    with serving(tmp_path, {"handshake_ms_max": "200"}, secured=True) as served, served.connect() as link:
        link.sendall(said)
        assert link.recv(1) == b""


def test_a_handshake_that_stops_is_ended(tmp_path: Path) -> None:
    """A hello without end holds no place."""
    with serving(tmp_path, {"handshake_ms_max": "200"}, secured=True) as served, served.connect() as link:
        context = ssl.create_default_context()
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        with pytest.raises(ssl.SSLWantReadError):
            context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1").do_handshake()
        link.sendall(outgoing.read())
        while link.recv(65536):
            pass


def test_remoting_clients_are_known_while_they_are_there(tmp_path: Path) -> None:
    """And no longer, however many come."""
    with serving(tmp_path) as served:
        door = served.server._door
        assert door is not None
        with served.connect() as link:
            assert echoes(link)
            assert door.remoting_clients() == {link.getsockname()}
            for _ in range(200):
                assert served.remoting()
            wait_until(lambda: len(door.remoting_clients()) == 1, "the others are gone", TIMEOUT_S)
            assert len(door._port._remoting_links) < 200


def test_remoting_clients_with_tls_are_known_while_they_are_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They have no calls, and if crowded, the port would hang up on them first; nor is a loss of them logged."""
    with serving(tmp_path, secured=True) as served:
        door = served.server._door
        assert door is not None
        with served.connect() as link, served.seal(link) as stream:
            assert echoes(stream)
            wait_until(lambda: door.remoting_clients() == {stream.getsockname()}, "it is known", TIMEOUT_S)
        wait_until(lambda: not door.remoting_clients(), "it is gone", TIMEOUT_S)
    assert "was lost" not in caplog.text


# --- further ports ---------------------------------------------------------------------------------------------------


def test_grpc_has_a_port_of_its_own(tmp_path: Path) -> None:
    """There it is served directly; remoting is not."""
    (port,) = free_ports(1)
    with serving(tmp_path, {"grpcServerPort": str(port)}) as served:
        assert served.server.grpc_port == port
        for one in (port, served.server.port):
            with served.channel(one) as channel:
                served.send(channel)
        with served.connect(port) as link:
            link.sendall(FRAME)
            while link.recv(65536):  # HTTP/2's settings, and the end
                pass
        assert not served.seen


def test_the_port_of_grpc_is_two_above_unless_said_otherwise(tmp_path: Path) -> None:
    """Beside a port that the system chose it is any; and 0 stands for none."""
    (listen,) = free_ports(1)
    with serving(tmp_path / "1", {"listenPort": str(listen)}) as served, served.channel(listen + 2) as channel:
        assert served.server.grpc_port == listen + 2
        served.send(channel)
    with serving(tmp_path / "2", {"listenPort": "0"}) as served, served.channel(served.server.grpc_port) as channel:
        served.send(channel)
    with serving(tmp_path / "3", {"listenPort": str(listen), "grpcServerPort": "0"}) as served:
        assert served.server.grpc_port == 0
        assert not _is_open(listen + 2)


def test_a_port_of_grpc_that_is_taken_ends_the_start_with_advice(tmp_path: Path) -> None:
    """Probes and other programs rely on it: without a word they would find nobody."""
    (listen,) = free_ports(1)
    with (
        socket.create_server(("127.0.0.1", listen + 2)),
        pytest.raises(ConfigError, match=f"127.0.0.1:{listen + 2}: .*: set grpcServerPort to another port, or to 0"),
        serving(tmp_path, {"listenPort": str(listen)}),
    ):
        pass
    assert not _is_open(listen), "what was open is closed again"


def test_the_second_port_is_two_below_unless_said_otherwise(tmp_path: Path) -> None:
    """RocketMQ's own; of the same kind, and in its place another one or none."""
    vip, listen, other = _with_a_free_one_below()
    with serving(tmp_path / "1", {"listenPort": str(listen)}) as served:
        assert served.remoting(vip)
        with served.channel(vip) as channel:
            served.send(channel)
    with serving(tmp_path / "2", {"listenPort": str(listen), "vipPort": str(other)}) as served:
        assert served.remoting(other)
        assert not _is_open(vip)
    with serving(tmp_path / "3", {"listenPort": str(listen)}, remoting=False):
        assert not _is_open(vip), "nobody would use it"
    with serving(tmp_path / "4", {"listenPort": str(listen), "vipPort": "0"}):
        assert not _is_open(vip)


def test_a_second_port_that_is_taken_is_missed_only_by_who_asked_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Few use it: without a word the broker starts and says so."""
    vip, listen, _ = _with_a_free_one_below()
    with socket.create_server(("127.0.0.1", vip)):
        with caplog.at_level(logging.WARNING), serving(tmp_path / "1", {"listenPort": str(listen)}) as served:
            assert served.remoting()
        assert "no VIP port" in caplog.text
        with (
            pytest.raises(ConfigError, match=f"cannot listen on the broker's VIP address 127.0.0.1:{vip}"),
            serving(tmp_path / "2", {"listenPort": str(listen), "vipPort": str(vip)}),
        ):
            pass
    assert not _is_open(listen), "what was open is closed again"


def _with_a_free_one_below() -> tuple[int, int, int]:
    listen, other = free_ports(2)
    return listen - 2, listen, other


def _is_open(port: int) -> bool:
    with socket.socket() as link:
        return link.connect_ex(("127.0.0.1", port)) == 0


def test_ports_that_are_the_same_are_told() -> None:
    """Each by its name."""
    advice = "set grpc_server_port to another one, or to 0 for none"
    assert BrokerConfig(grpc_server_port=10911, vip_port=10911).problems() == [
        "vip_port=10911 is also listen_port: change one of them",
        f"grpc_server_port=10911 is also listen_port: {advice}",
    ]
    for taken, name in ((5000, "vip_port"), (10912, "ha_listen_port"), (5557, "metrics_port")):
        found = BrokerConfig(grpc_server_port=taken, vip_port=5000, metrics_port=5557).problems()
        assert found == [f"grpc_server_port={taken} is also {name}: {advice}"]
    assert BrokerConfig(vip_port=10913).problems() == [
        f"grpc_server_port=10913 (listen_port + 2) is also vip_port: {advice}"
    ]
    assert BrokerConfig(listen_port=65534).problems() == [
        f"grpc_server_port=65536 (listen_port + 2) is not a valid port: {advice}"
    ]
    assert BrokerConfig(listen_port=65534, grpc_server_port=0).problems() == []


def test_tls_cannot_be_enforced_without_certificates() -> None:
    """Or remoting would be refused, or worse, not."""
    with pytest.raises(ConfigError, match="enforcing requires a certificate"):
        load_broker_settings(None, {}, {"tls.server.mode": "Enforcing"})
    with pytest.raises(ConfigError, match="use one of disabled, permissive, enforcing"):
        load_broker_settings(None, {}, {"tls.server.mode": "on"})


def test_half_a_preface_is_not_relayed_yet(tmp_path: Path) -> None:
    """It may still become something else."""
    with serving(tmp_path) as served, served.connect() as link:
        link.sendall(PREFACE[:10])
        link.sendall(b"!")
        assert link.recv(1) == b""
