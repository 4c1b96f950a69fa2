"""Clients with access keys, against guarded fake nodes behind real ports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dledger.access.guard import AccessControl
from dledger.client import ClientSecurity, DLedgerClient
from dledger.clock import Clock
from dledger.config import AccessConfig, ServerConfig
from dledger.errors import AccessDeniedError, ConfigError, DLedgerError
from dledger_cli.local.group import free_ports
from tests.support.fake_node import FakeNode, client_server

ALICE = ClientSecurity(access_key="alice", secret_key="alice-secret")
WRONG = ClientSecurity(access_key="alice", secret_key="wrong-secret")
RULES = "accounts:\n- accessKey: alice\n  secretKey: alice-secret\n  topicPerms:\n  - default=PUB|SUB\n"


class GuardedNode:
    """A fake node behind a guarded port, which can be restarted."""

    def __init__(self, directory: Path) -> None:
        file = directory / "plain_acl.yml"
        file.touch(0o600)
        file.write_text(RULES)
        self._access = AccessConfig(acl_enable=True, acl_file=file)
        self.node = FakeNode()
        self._port = 0
        self.start()

    def start(self) -> None:
        control = AccessControl.of(self._access, name="n0", clock=Clock())
        assert control is not None
        config = ServerConfig(client_port=self._port, grpc_server_port=0, access=self._access)
        self.server = client_server(config, self.node, control.guard)
        self.server.start()
        self._port = self.server.port

    def restart(self) -> None:
        self.server.close()
        self.start()

    @property
    def address(self) -> str:
        return self.server.address


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[GuardedNode]:
    made = GuardedNode(tmp_path)
    yield made
    made.server.close()


def first_calls(client: DLedgerClient) -> list[Callable[[], object]]:
    return [
        lambda: client.append(b"x"),
        lambda: client.read(0),
        lambda: client.metadata(),
        lambda: client.members_status()["n0"],  # type: ignore[index]  # a NodeId
        lambda: next(iter(client.follow(0))),
        lambda: next(iter(client.watch_role())),
        lambda: client.submit(b"y").result(60),
    ]


@pytest.mark.parametrize("number", range(7))
def test_any_call_may_be_the_first(guarded: GuardedNode, number: int) -> None:
    """Each request is signed, also the one that asks what the server is."""
    with DLedgerClient(guarded.address, security=ALICE) as other:
        other.append(b"something to read")
    with DLedgerClient(guarded.address, security=ALICE) as client:
        assert not isinstance(first_calls(client)[number](), DLedgerError)


@pytest.mark.parametrize("number", range(7))
def test_any_call_may_be_the_first_after_a_restart(guarded: GuardedNode, number: int) -> None:
    """On a new connection."""
    with DLedgerClient(guarded.address, security=ALICE) as client:
        client.append(b"before")
        guarded.restart()

        assert not isinstance(first_calls(client)[number](), DLedgerError)


def test_a_wrong_secret_is_told_at_once_and_not_repeated(
    guarded: GuardedNode, caplog: pytest.LogCaptureFixture
) -> None:
    """One refusal in the audit log: it is no reason to try again."""
    with DLedgerClient(guarded.address, security=WRONG) as client, pytest.raises(AccessDeniedError) as refused:
        client.metadata()

    assert refused.value.outcome == "not_applied"
    assert caplog.text.count("dledger.audit") == 1


@pytest.mark.parametrize("number", range(7))
@pytest.mark.parametrize("gone_first", [True, False])
def test_a_refusal_is_told_rather_than_another_nodes_silence(
    guarded: GuardedNode, number: int, gone_first: bool
) -> None:
    """With a wrong key and a member that is down, the error names the key, whichever node is asked first."""
    addresses = [f"127.0.0.1:{free_ports(1)[0]}", guarded.address]
    client = DLedgerClient(addresses if gone_first else addresses[::-1], security=WRONG)
    with client, pytest.raises(AccessDeniedError):
        first_calls(client)[number]()


def test_keys_are_given_together_and_never_shown() -> None:
    """Half a key would send unsigned requests."""
    for half in ({"access_key": "a"}, {"secret_key": "s"}):
        with pytest.raises(ConfigError, match="must be given together"):
            ClientSecurity(**half)  # type: ignore[arg-type]
    assert "alice-secret" not in repr(ALICE)
