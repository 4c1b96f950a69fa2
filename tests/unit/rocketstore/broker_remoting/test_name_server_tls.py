"""A broker registers with name servers over TLS, and tells its routes to no other server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dledger.config import ClientAuth, SecurityConfig
from dledger.errors import ConfigError
from dledger.types import TlsServerMode
from dledger_cli import certs
from rocketstore.broker_config import BrokerConfig
from rocketstore.config import MessageStoreConfig
from rocketstore.nameserver.server import NameServer
from rocketstore.server import BrokerServer
from rocketstore.settings import load_broker_settings
from tests.support.waiting import wait_until
from tests.unit.rocketstore.nameserver.wire import config_in, running


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Certificates of a CA, a name server at 127.0.0.1, one elsewhere, and a broker."""
    made = tmp_path / "certs"
    certs.make_authority(made)
    certs.make_node(made, "here", ["127.0.0.1"])
    certs.make_node(made, "elsewhere", ["192.0.2.1"])
    certs.make_client(made, "broker")
    return made


@contextmanager
def _name_server(
    directory: Path, tmp_path: Path, name: str = "here", auth: ClientAuth = ClientAuth.REQUIRE
) -> Iterator[NameServer]:
    pair = certs.Pair.named(directory, name)
    security = SecurityConfig(pair.cert, pair.key, directory / "ca.crt", tls_client_auth=auth)
    with running(config_in(tmp_path, security=security, tls_server_mode=TlsServerMode.ENFORCING)) as server:
        yield server


@contextmanager
def _broker(tmp_path: Path, server: NameServer, **settings: Any) -> Iterator[BrokerServer]:  # noqa: ANN401  # of a broker
    store = MessageStoreConfig(store_path_root_dir=tmp_path / "broker", mapped_file_size_commit_log=1 << 20)
    broker = BrokerServer(BrokerConfig(store=store, listen_port=0, namesrv_addr=server.address, **settings))
    broker.start()
    try:
        yield broker
    finally:
        broker.stop(graceful=False)


def _failure(broker: BrokerServer) -> str:
    registration = broker._ports._registration
    assert registration is not None
    found: list[str] = []

    def has_failed() -> bool:
        found[:] = registration.failures().values()
        return bool(found)

    wait_until(has_failed, "the registration fails")
    return found[0]


def test_a_name_server_that_enforces_tls_takes_a_broker_with_a_certificate(directory: Path, tmp_path: Path) -> None:
    """Also one that has none for its own clients."""
    pair = certs.Pair.named(directory, "broker")
    files = {"namesrv_tls_cert_path": pair.cert, "namesrv_tls_key_path": pair.key}
    with (
        _name_server(directory, tmp_path) as server,
        _broker(tmp_path, server, namesrv_tls=True, namesrv_tls_trust_cert_path=directory / "ca.crt", **files),
    ):
        wait_until(lambda: server.measure().addresses == 1, "the broker has registered")


def test_a_broker_shows_the_certificate_that_it_has_for_clients(directory: Path, tmp_path: Path) -> None:
    """And trusts the same CA, unless it is told otherwise."""
    pair = certs.Pair.named(directory, "here")
    security = SecurityConfig(pair.cert, pair.key, directory / "ca.crt")
    with (
        _name_server(directory, tmp_path) as server,
        _broker(tmp_path, server, namesrv_tls=True, security=security),
    ):
        wait_until(lambda: server.measure().addresses == 1, "the broker has registered")


def test_a_broker_tells_nothing_to_a_server_that_it_cannot_verify(directory: Path, tmp_path: Path) -> None:
    """Of another CA, or with a certificate for another host."""
    certs.make_authority(tmp_path / "others")
    for name, ca in (("here", tmp_path / "others"), ("elsewhere", directory)):
        with (
            _name_server(directory, tmp_path, name, ClientAuth.NONE) as server,
            _broker(tmp_path, server, namesrv_tls=True, namesrv_tls_trust_cert_path=ca / "ca.crt") as broker,
        ):
            assert "certificate verify failed" in _failure(broker)
            assert server.measure().addresses == 0


def test_a_broker_without_tls_is_not_taken(directory: Path, tmp_path: Path) -> None:
    with _name_server(directory, tmp_path) as server, _broker(tmp_path, server) as broker:
        assert _failure(broker)
        assert server.measure().addresses == 0


def test_the_settings_have_the_names_of_rocketmq(tmp_path: Path) -> None:
    """``tls.client.authServer`` changes nothing: servers are always verified."""
    file = tmp_path / "broker.conf"
    file.write_text(
        "namesrvAddr=127.0.0.1:9876\ntls.enable=true\ntls.client.trustCertPath=/ca.pem\n"
        "tls.client.certPath=/c.pem\ntls.client.keyPath=/k.pem\ntls.client.authServer=true\n"
    )
    config, warnings = load_broker_settings(file, {}, {})
    assert config.namesrv_tls
    assert config.namesrv_tls_files == (Path("/ca.pem"), Path("/c.pem"), Path("/k.pem"))
    assert any("tls.client.authServer" in one for one in warnings)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"namesrv_tls": True}, "namesrv_tls_trust_cert_path"),
        ({"namesrv_tls_cert_path": Path("c")}, "need namesrv_tls=true"),
        (
            {"namesrv_tls": True, "namesrv_tls_trust_cert_path": Path("ca"), "namesrv_tls_key_path": Path("k")},
            "must be set together",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(settings: dict[str, Any], problem: str) -> None:
    assert any(problem in one for one in BrokerConfig(**settings).problems())


def test_files_that_cannot_be_used_are_told_at_the_start(directory: Path, tmp_path: Path) -> None:
    """And not with the first registration, which would be tried for ever."""
    missing = tmp_path / "missing.pem"
    with (
        _name_server(directory, tmp_path) as server,
        pytest.raises(ConfigError, match=r"missing\.pem"),
        _broker(tmp_path, server, namesrv_tls=True, namesrv_tls_trust_cert_path=missing),
    ):
        pass
