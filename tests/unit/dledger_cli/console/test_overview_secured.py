"""The console of all groups over a whole broker with access control and certificates."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dledger.config import AccessConfig, SecurityConfig
from dledger.types import TlsServerMode
from dledger_cli import certs
from dledger_cli.console.server import ConsoleServer, ListenAddress
from dledger_cli.targets import BrokerTarget, CommandSecurity, GroupTarget
from rocketstore.nameserver.server import NameServer
from rocketstore.server import BrokerServer
from tests.support.certificates import files
from tests.support.waiting import wait_until
from tests.unit.dledger_cli.console.support import request
from tests.unit.dledger_cli.console.test_overview import FAST
from tests.unit.rocketstore.nameserver.wire import config_in, running
from tests.unit.rocketstore.test_server import plain

RULES = "accounts:\n- accessKey: alice\n  secretKey: alice-secret\n  defaultTopicPerm: PUB|SUB\n"


@contextmanager
def guarded(directory: Path, name_server: NameServer, security: SecurityConfig | None = None) -> Iterator[None]:
    """A plain broker with access control, which registers."""
    rules = directory / "plain_acl.yml"
    rules.write_text(RULES)
    rules.chmod(0o600)
    config = replace(
        plain(directory, namesrvAddr=name_server.address, autoCreateTopicEnable="true"),
        access=AccessConfig(acl_enable=True, acl_file=rules),
    )
    broker = BrokerServer(config if security is None else replace(config, security=security)).start()
    try:
        yield
    finally:
        broker.stop()


@contextmanager
def overview(name_server: NameServer, security: CommandSecurity) -> Iterator[ConsoleServer]:
    target = GroupTarget(("127.0.0.1:1",), "", 20.0, security)
    brokers = BrokerTarget(target.bootstrap, 20.0, security, (name_server.address,))
    with ConsoleServer(target, brokers, place=ListenAddress(port=0), fleet_pace=FAST) as console:
        yield console


def group(console: ConsoleServer) -> Any:  # noqa: ANN401  # JSON
    groups: Any = request(f"{console.url}api/state").json()["groups"]
    return groups[0] if groups else {"verdict": "", "more": ""}


def title(console: ConsoleServer) -> str:
    overall: Any = request(f"{console.url}api/state").json()["overall"]
    return str(overall["title"])


def test_brokers_are_asked_with_the_consoles_account(tmp_path: Path) -> None:
    """Without one, or with a wrong secret, they refuse, and their reason is shown."""
    alice = CommandSecurity(access_key="alice", secret_key="alice-secret", trust_name_servers=True)
    with running(config_in(tmp_path)) as server, guarded(tmp_path, server), ExitStack() as stack:
        known, stranger, wrong = [
            stack.enter_context(overview(server, one))
            for one in (alice, CommandSecurity(), replace(alice, secret_key="guessed, and wrong"))
        ]
        wait_until(lambda: group(known)["verdict"] == "serving", "it answers alice")
        wait_until(lambda: group(stranger)["verdict"] == "refuses to tell", "it refuses a stranger")
        wait_until(lambda: group(wrong)["verdict"] == "refuses to tell", "it refuses a guess")

        assert "requires an access key" in group(stranger)["more"]
        topic: Any = request(f"{known.url}api/topic?name=TBW102").json()
        assert [(one["error"], len(one["queues"]) > 0) for one in topic["groups"]] == [("", True)]
        refused: Any = request(f"{stranger.url}api/topic?name=TBW102").json()
        assert "requires an access key" in refused["groups"][0]["error"]


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    """Certificates of a CA, a server and a client."""
    made = tmp_path / "certs"
    certs.make_authority(made)
    certs.make_node(made, "server")
    certs.make_client(made, "client")
    return made


def test_name_servers_and_brokers_are_asked_over_tls(tmp_path: Path, authority: Path) -> None:
    """With the console's certificate; without TLS nobody answers, and that is told."""
    served, own = files(authority, "server"), files(authority, "client")
    security = SecurityConfig(served.cert, served.key, served.ca)
    permissive = config_in(tmp_path, security=security, tls_server_mode=TlsServerMode.PERMISSIVE)
    tls = CommandSecurity(own.ca, own.cert, own.key, access_key="alice", secret_key="alice-secret")
    with running(permissive) as server, guarded(tmp_path, server, security), overview(server, tls) as console:
        wait_until(lambda: group(console)["verdict"] == "serving", "it answers")
        clients = request(f"{console.url}api/clients?broker={group(console)['name']}&first=0")
        assert (clients.status, clients.json()["groups"]) == (200, 0)
        console.stop()
    gc.collect()  # what it has left open would be told here
    with running(config_in(tmp_path, security=security)) as server, overview(server, CommandSecurity()) as console:
        wait_until(lambda: title(console) == "No name server answers", "it is told")
