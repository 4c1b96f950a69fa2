"""A name server with certificates: who gets in, and that new ones are taken into use."""

from __future__ import annotations

import socket
import ssl
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.blocking_remoting import BlockingRemotingClient
from dledger.config import ClientAuth, SecurityConfig
from dledger.remoting.client import UnreachableError
from dledger.remoting.codes import AnswerCode
from dledger.remoting.connection import DisconnectedError
from dledger.remoting.frame import Frame
from dledger.rpc import tls
from dledger.types import TlsServerMode
from dledger.values import parse_address
from dledger_cli import certs
from rocketstore.nameserver.server import NameServer
from rocketstore.remoting.codes import RequestCode
from tests.support.certificates import files
from tests.unit.rocketstore.nameserver.wire import TIMEOUT_S, config_in, running


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Certificates of a CA, a server and a client."""
    made = tmp_path / "certs"
    certs.make_authority(made)
    certs.make_node(made, "ns")
    certs.make_client(made, "client")
    return made


def _security(directory: Path, *, auth: ClientAuth = ClientAuth.REQUIRE) -> SecurityConfig:
    server = files(directory, "ns")
    return SecurityConfig(server.cert, server.key, server.ca, tls_client_auth=auth)


def _context(directory: Path, *, name: str = "client") -> ssl.SSLContext:
    if not name:
        return ssl.create_default_context(cafile=str(directory / "ca.crt"))
    return tls.client_context(tls.read(files(directory, name)))


def _asks(server: NameServer, context: ssl.SSLContext | None) -> bool:
    """Whether it serves a client with these certificates, or without TLS."""
    with closing(BlockingRemotingClient(tls=None if context is None else lambda: context)) as frames:
        try:
            answer = frames.call(server.address, Frame(RequestCode.GET_BROKER_CLUSTER_INFO, 0), TIMEOUT_S)
        except (UnreachableError, DisconnectedError, TimeoutError):
            return False
        return answer.code == AnswerCode.SUCCESS


def test_only_clients_of_the_ca_get_in(directory: Path, tmp_path: Path) -> None:
    """With the mode that certificates have by default."""
    with running(config_in(tmp_path, security=_security(directory))) as server:
        assert _asks(server, _context(directory))
        assert not _asks(server, _context(directory, name=""))
        assert not _asks(server, None)


def test_clients_without_certificates_or_tls_get_in_if_they_may(directory: Path, tmp_path: Path) -> None:
    """As RocketMQ's own clients, which show none by default."""
    security = _security(directory, auth=ClientAuth.NONE)
    config = config_in(tmp_path, security=security, tls_server_mode=TlsServerMode.PERMISSIVE)
    with running(config) as server:
        assert _asks(server, _context(directory, name=""))
        assert _asks(server, None)
    with running(config_in(tmp_path, security=security, tls_server_mode=TlsServerMode.DISABLED)) as server:
        assert not _asks(server, _context(directory))
        assert _asks(server, None)
    with running(config_in(tmp_path)) as server:
        assert not _asks(server, _context(directory))


def test_a_renewed_certificate_is_shown_to_the_next_client(directory: Path, tmp_path: Path) -> None:
    """Without a restart, and without the connections there are."""
    with running(config_in(tmp_path, security=_security(directory))) as server:

        def shown() -> bytes | None:
            address = parse_address(server.address)
            with (
                socket.create_connection(address, TIMEOUT_S) as link,
                _context(directory).wrap_socket(link, server_hostname=address[0]) as stream,
            ):
                return stream.getpeercert(binary_form=True)

        before = shown()
        assert shown() == before
        certs.renew(directory, "ns", days=30, new_key=True)
        assert shown() != before
        assert _asks(server, _context(directory))
