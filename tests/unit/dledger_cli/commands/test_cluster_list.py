"""``dledger cluster list --namesrv``: what name servers know, and what the brokers say of themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dledger.remoting.frame import is_signed
from dledger_cli import cli
from rocketstore.nameserver.server import NameServer
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.topics import KVTable
from tests.support.runtime_broker import ours, runtime_broker
from tests.unit.dledger_cli.commands.brokers_here import scripted
from tests.unit.rocketstore.nameserver.wire import calling, config_in, running


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NameServer]:
    """A name server that knows nobody."""
    with running(config_in(tmp_path)) as started:
        yield started


def run(*words: str, **environ: str) -> Result:
    """The command."""
    return CliRunner().invoke(cli.main, ["cluster", "list", *words], env=environ)


def test_brokers_are_listed_with_what_they_say(server: NameServer) -> None:
    """As mqadmin's clusterList shows them; one that refuses, or does not answer, is listed all the same."""
    with calling(server) as caller, runtime_broker() as master, runtime_broker({}) as slave:
        caller.register(0, master.address)
        caller.register(1, slave.address)
        caller.register(2, "127.0.0.1:1")

        listed = run("--namesrv", server.address, "--timeout", "2")
        told = run("--json", "--timeout", "2", DLEDGER_NAMESRV=server.address)

    assert (listed.exit_code, told.exit_code) == (0, 0), listed.output
    lines = [line.split() for line in listed.output.splitlines()]
    assert lines[1][:8] == ["c", "g", "0", master.address, "master", "V4_9_7", "1.50", "7.25"]
    assert lines[2][:5] == ["c", "g", "1", slave.address, "slave"]
    assert lines[3][:6] == ["c", "g", "2", "127.0.0.1:1", "unreachable", "Connection"]
    brokers = json.loads(told.output)["brokers"]
    assert json.loads(told.output)["master"] == master.address
    assert [(one["address"], one["broker_id"], one["is_master"], one.get("version", "")) for one in brokers] == [
        (master.address, 0, True, "V4_9_7"),
        (slave.address, 1, False, ""),
        ("127.0.0.1:1", 2, False, ""),
    ]


@pytest.mark.parametrize("command", ["cluster list", "cluster rebalance", "broker status"])
def test_nobody_gets_a_signature_who_has_only_registered(
    server: NameServer, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Anybody can register, and would use the signature at the real brokers; the error says what to do."""
    monkeypatch.setenv("DLEDGER_SECRET_KEY", "a secret of some length")
    with calling(server) as caller, runtime_broker() as stranger:
        caller.register(0, stranger.address)

        words = [*command.split(), "--namesrv", server.address, "--access-key", "alice", "--json"]
        told = CliRunner().invoke(cli.main, words)

    assert stranger.fields == {}
    assert told.exit_code == 2
    assert "anybody can register an address at a name server" in told.output


def test_a_group_of_ours_tells_its_term_to_whoever_signs(server: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number, in JSON as in the table; the request has the account's signature, if name servers can be trusted."""
    monkeypatch.setenv("DLEDGER_SECRET_KEY", "a secret of some length")
    with calling(server) as caller, runtime_broker(ours("n0", "LEADER", 7, {"n0": ""})) as master:
        caller.register(0, master.address)

        listed = run("--namesrv", server.address, "--access-key", "alice", "--trust-name-servers", "--json")

    (found,) = json.loads(listed.output)["brokers"]
    assert (found["term"], found["put_tps"], found["get_tps"]) == (7, 1.5, 7.25)
    assert is_signed("a secret of some length", master.fields, b"")
    assert master.fields["AccessKey"] == "alice"


def test_brokers_elsewhere_are_not_asked_in_plaintext(server: NameServer) -> None:
    """Though the name server that knows them is on this machine."""
    with calling(server) as caller:
        caller.register(0, "192.0.2.7:10911")

        listed = run("--namesrv", server.address, "--timeout", "2")

    assert "plaintext is for loopback addresses" in listed.output


def test_no_master_is_exit_code_1(server: NameServer) -> None:
    """Nobody at all, too."""
    assert (empty := run("--namesrv", server.address, "--timeout", "2")).exit_code == 1
    assert "no broker has registered" in empty.output
    with calling(server) as caller:
        caller.register(1, "127.0.0.1:1")
        headless = run("--namesrv", server.address, "--timeout", "2")

    assert headless.exit_code == 1
    assert "no master: g" in headless.output


def test_a_master_that_does_not_answer_is_none(server: NameServer) -> None:
    """A name server knows it for two minutes more; nobody can send meanwhile."""
    with calling(server) as caller, runtime_broker() as slave:
        caller.register(0, "127.0.0.1:1")
        caller.register(1, slave.address)
        listed = run("--namesrv", server.address, "--timeout", "2")

    assert (listed.exit_code, listed.stderr) == (1, "error: no master: g: sends wait until there is one\n")


def test_what_cannot_be_asked_is_told() -> None:
    """Nobody there, plaintext to elsewhere, certificates that are not there."""
    assert (down := run("--namesrv", "127.0.0.1:1", "--timeout", "2")).exit_code == 1
    assert "cannot connect to 127.0.0.1:1" in down.output
    assert (remote := run("--namesrv", "10.0.0.1:9876")).exit_code == 2
    assert "--insecure" in remote.output
    assert (files := run("--namesrv", "10.0.0.1:9876", "--tls-ca", "/no/such/file")).exit_code == 2
    assert "/no/such/file" in files.output
    assert run("--namesrv", "nowhere").exit_code == 2


def test_a_given_broker_that_the_others_do_not_know_yet_is_listed() -> None:
    """A member learns others' addresses one by one; the same broker at another address is not listed twice."""
    with scripted() as asked, runtime_broker(ours("n1", "FOLLOWER", 7, {})) as other:
        asked.scripts[RequestCode.GET_BROKER_RUNTIME_INFO] = lambda frame: frame.answer(
            body=KVTable(ours("n0", "LEADER", 7, {})).encode()
        )
        alias = asked.address.replace("127.0.0.1", "localhost")
        listed = run("-b", f"{asked.address},{other.address},{alias}", "--json")

    assert [one["address"] for one in json.loads(listed.stdout)["brokers"]] == [asked.address, other.address]
