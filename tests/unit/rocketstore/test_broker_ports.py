"""A broker's ports: RocketMQ's remoting at ``listenPort`` and the VIP port, gRPC at its own."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2

from dledger.config import SecurityConfig
from dledger.errors import ConfigError
from dledger.rpc import tls
from dledger.rpc.clients import connections
from dledger.types import TlsServerMode
from dledger_cli import certs
from dledger_cli.local.group import free_ports
from rocketstore.broker_config import BrokerConfig
from rocketstore.remoting.codes import RequestCode
from rocketstore.server import BrokerServer
from rocketstore.settings import load_broker_settings
from tests.support.certificates import files
from tests.support.http2 import Http2Link
from tests.support.remoting import RemotingSocket
from tests.support.waiting import wait_until

TIMEOUT_S = 120.0
GRPC_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.ssl_target_name_override", "n0")]


class Served:
    """A broker, and how its clients ask it for a sign of life."""

    def __init__(self, server: BrokerServer, directory: Path) -> None:
        self.server = server
        self._directory = directory

    def context(self, name: str) -> ssl.SSLContext:
        """A client's TLS; without a name it shows no certificate."""
        context = ssl.create_default_context(cafile=str(self._directory / "ca.crt"))
        context.check_hostname = False
        if name:
            pair = files(self._directory, name)
            context.load_cert_chain(str(pair.cert), str(pair.key))
        return context

    def remoting(self, port: int = 0, *, tls_as: str | None = None) -> bool:
        """Whether a request is answered there, with the certificate of ``tls_as``; None: in plaintext."""
        try:
            with RemotingSocket(port or self.server.port) as client:
                if tls_as is not None:
                    client.socket = self.context(tls_as).wrap_socket(client.socket)
                return client.ask(RequestCode.GET_BROKER_RUNTIME_INFO).code == 0
        except (OSError, EOFError):
            return False

    def grpc(self, port: int = 0, *, tls_as: str | None = None) -> grpc.StatusCode:
        """How gRPC's health check ends there."""
        address = f"127.0.0.1:{port or self.server.grpc_port}"
        if tls_as is None:
            channel = grpc.insecure_channel(address, options=GRPC_OPTIONS[:1])
        else:
            shown = tls.read(files(self._directory, tls_as or "client"))
            chain = (shown.key, shown.chain) if tls_as else (None, None)
            channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(shown.ca, *chain), options=GRPC_OPTIONS)
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            "/grpc.health.v1.Health/Check", request_serializer=None, response_deserializer=None
        )
        with channel:
            try:
                answer = health_pb2.HealthCheckResponse.FromString(check(b"", timeout=TIMEOUT_S))
            except grpc.RpcError as error:
                return error.code()
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        return grpc.StatusCode.OK


@contextmanager
def serving(root: Path, settings: Mapping[str, str] | None = None, *, secured: bool = False) -> Iterator[Served]:
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
    server = BrokerServer(config)
    try:
        server.start()
        yield Served(server, certificates)
    finally:
        server.stop()


def test_each_port_has_its_own_protocol(tmp_path: Path) -> None:
    """A client at the wrong one is refused, and nobody else notices."""
    with serving(tmp_path) as served:
        assert served.remoting()
        assert served.grpc() is grpc.StatusCode.OK
        assert served.grpc(served.server.port) is grpc.StatusCode.UNIMPLEMENTED
        assert not served.remoting(served.server.grpc_port)
        assert served.remoting()
        assert served.grpc() is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("mode", "plain", "sealed"),
    [("", False, True), ("enforcing", False, True), ("permissive", True, True), ("disabled", True, False)],
)
def test_tls_is_used_as_it_was_told(tmp_path: Path, mode: str, plain: bool, sealed: bool) -> None:
    """RocketMQ's ``tls.server.mode`` is about remoting; with certificates, gRPC has TLS too, and clients show one."""
    settings = {"tls.server.mode": mode} if mode else {}
    with serving(tmp_path, settings, secured=True) as served:
        assert served.remoting() is plain
        assert served.remoting(tls_as="client") is sealed
        assert not served.remoting(tls_as=""), "clients must show a certificate"
        assert served.grpc() is grpc.StatusCode.UNAVAILABLE
        assert served.grpc(tls_as="") is grpc.StatusCode.UNAVAILABLE
        assert served.grpc(tls_as="client") is grpc.StatusCode.OK


def test_clients_need_no_certificate_if_that_was_said(tmp_path: Path) -> None:
    """One setting for gRPC and remoting."""
    with serving(tmp_path, {"tls_client_auth": "none"}, secured=True) as served:
        assert served.remoting(tls_as="")
        assert served.grpc(tls_as="") is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("mode", "plain", "sealed"),
    [("", False, True), ("enforcing", False, True), ("permissive", True, True), ("disabled", True, False)],
)
def test_grpc_uses_tls_as_it_was_told(tmp_path: Path, mode: str, plain: bool, sealed: bool) -> None:
    """``grpc_tls_mode``: one port takes TLS, plaintext or both; a certificate that is asked for is asked for always."""
    status = {True: grpc.StatusCode.OK, False: grpc.StatusCode.UNAVAILABLE}
    with serving(tmp_path, {"grpc_tls_mode": mode} if mode else {}, secured=True) as served:
        assert served.grpc() is status[plain]
        assert served.grpc(tls_as="client") is status[sealed]
        assert served.grpc(tls_as="") is grpc.StatusCode.UNAVAILABLE
        assert not served.remoting()


@pytest.mark.parametrize(("mode", "plain"), [("", True), ("permissive", True), ("enforcing", False)])
def test_a_certificate_of_its_own_is_for_who_believes_any(tmp_path: Path, mode: str, plain: bool) -> None:
    """``grpc_self_signed``: TLS works without certificates that somebody made, and remoting is as before."""
    settings = {"grpc_self_signed": "true"} | ({"grpc_tls_mode": mode} if mode else {})
    with serving(tmp_path, settings) as served:
        assert served.grpc() is (grpc.StatusCode.OK if plain else grpc.StatusCode.UNAVAILABLE)
        assert served.remoting()
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        where = ("127.0.0.1", served.server.grpc_port)
        with socket.create_connection(where, TIMEOUT_S) as link, context.wrap_socket(link) as sealed:
            assert sealed.selected_alpn_protocol() == "h2"
            shown = x509.load_der_x509_certificate(sealed.getpeercert(binary_form=True) or b"")
    names = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "localhost" in names.get_values_for_type(x509.DNSName)


def test_settings_of_grpcs_tls_that_contradict_each_other_are_told() -> None:
    """With what to do."""
    file = Path("a.pem")
    certificates = SecurityConfig(tls_cert_path=file, tls_key_path=file, tls_trust_cert_path=file)
    for config, advice in (
        (BrokerConfig(grpc_tls_mode=TlsServerMode.ENFORCING), "or grpc_self_signed=true"),
        (BrokerConfig(grpc_tls_mode=TlsServerMode.PERMISSIVE), "or grpc_self_signed=true"),
        (BrokerConfig(grpc_self_signed=True, security=certificates), "for a broker without certificates"),
    ):
        (problem,) = config.problems()
        assert problem.startswith("grpc_")
        assert advice in problem
    assert BrokerConfig(grpc_self_signed=True).problems() == []
    assert BrokerConfig(grpc_tls_mode=TlsServerMode.DISABLED).problems() == []


@pytest.mark.parametrize("relayed", [False, True])
def test_limits_of_connections_hold_for_each_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relayed: bool
) -> None:
    """Of one address no more than its share stay at gRPC's; who speaks remoting is not counted there."""
    monkeypatch.setattr(connections, "GRACE_S", 0.1)
    monkeypatch.setattr(connections, "LOOK_INTERVAL_S", 0.1)
    settings = {"connections_max": "8", "grpc_self_signed": str(relayed).lower()}
    with serving(tmp_path, settings) as served, ExitStack() as held:
        busy = held.enter_context(RemotingSocket(served.server.port))
        links = [held.enter_context(Http2Link("127.0.0.1", served.server.grpc_port)) for _ in range(14)]
        for link in links:
            link.begin()
        wait_until(lambda: sum(one.is_closed() for one in links) >= 8, "idle ones are hung up on", TIMEOUT_S)
        assert busy.ask(RequestCode.GET_BROKER_RUNTIME_INFO).code == 0
        assert served.grpc() is grpc.StatusCode.OK
        more = [held.enter_context(RemotingSocket(served.server.port)) for _ in range(14)]
        wait_until(lambda: sum(one.is_hung_up for one in more) >= 9, "the surplus is hung up on", TIMEOUT_S)


@pytest.mark.parametrize(("host", "dialled"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "::1")])
def test_clients_reach_both_ports_at_the_address_listened_on(tmp_path: Path, host: str, dialled: str) -> None:
    """IPv4, IPv6, and IPv4 at a port of both."""
    with serving(tmp_path, {"listenHost": host, "insecure": "true"}) as served:
        for port in (served.server.port, served.server.grpc_port):
            with socket.create_connection((dialled, port), TIMEOUT_S):
                pass


# --- further ports ---------------------------------------------------------------------------------------------------


def test_the_port_of_grpc_is_two_above_unless_said_otherwise(tmp_path: Path) -> None:
    """Beside a port that the system chose it is any; and 0 stands for none."""
    listen, other = free_ports(2)
    for given, wanted in (("", listen + 2), (str(other), other)):
        settings = {"listenPort": str(listen)} | ({"grpcServerPort": given} if given else {})
        with serving(tmp_path / f"1{given}", settings) as served:
            assert served.server.grpc_port == wanted
            assert served.grpc() is grpc.StatusCode.OK
    with serving(tmp_path / "2", {"listenPort": "0"}) as served:
        assert served.grpc() is grpc.StatusCode.OK
    with serving(tmp_path / "3", {"listenPort": str(listen), "grpcServerPort": "0"}) as served:
        assert served.server.grpc_port == 0
        assert served.remoting()
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
        assert served.grpc(vip) is grpc.StatusCode.UNIMPLEMENTED
    with serving(tmp_path / "2", {"listenPort": str(listen), "vipPort": str(other)}) as served:
        assert served.remoting(other)
        assert not _is_open(vip)
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
