"""``dledger cluster list --namesrv``: what name servers know, and what the brokers say of themselves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cluster import cli
from dledger.rpc.bridge import LoopThread
from rocketstore.nameserver.server import NameServer
from rocketstore.remoting.bodies.routes import KVTable
from rocketstore.remoting.codes import AnswerCode, RequestCode
from rocketstore.remoting.connection import RemotingConnection
from rocketstore.remoting.frame import Frame
from rocketstore.remoting.server import Handlers, RemotingServer, ServerLimits
from tests.unit.rocketstore.nameserver.wire import calling, config_in, running

RUNTIME = {"brokerVersionDesc": "V4_9_7", "putTps": "1.5 2.5 3.5", "getTransferedTps": "7.25 0.0 0.0"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NameServer]:
    """A name server that knows nobody."""
    with running(config_in(tmp_path)) as started:
        yield started


@contextmanager
def broker(table: dict[str, str]) -> Iterator[str]:
    """What answers as a broker, and nothing else; gives its address."""

    def answer(connection: RemotingConnection, frame: Frame) -> None:
        body = KVTable(table).encode()
        connection.done(frame, frame.answer(body=body) if table else frame.answer(AnswerCode.SYSTEM_ERROR, "no"))

    handlers = Handlers({RequestCode.GET_BROKER_RUNTIME_INFO: answer}, {}, lambda _: None, lambda _: None)
    remoting = RemotingServer("broker", handlers, ServerLimits(9, 9, 9, 9, *[1 << 20] * 4))
    loop = LoopThread("broker")
    bridge = loop.start()

    async def serve() -> asyncio.Server:
        return await asyncio.get_running_loop().create_server(remoting.protocol, "127.0.0.1", 0)

    async def end() -> None:
        listening.close()
        await remoting.close(0)

    listening = bridge.run(serve())
    try:
        yield f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        bridge.run(end())
        loop.stop()


def run(*words: str, **environ: str) -> Result:
    """The command."""
    return CliRunner().invoke(cli.main, ["cluster", "list", *words], env=environ)


def test_brokers_are_listed_with_what_they_say(server: NameServer) -> None:
    """As mqadmin's clusterList shows them; one that does not answer is listed all the same."""
    with calling(server) as caller, broker(RUNTIME) as master, broker({}) as slave:
        caller.register(0, master)
        caller.register(1, slave)
        caller.register(2, "127.0.0.1:1")

        listed = run("--namesrv", server.address)
        told = run("--json", DLEDGER_NAMESRV=server.address)

    assert (listed.exit_code, told.exit_code) == (0, 0), listed.output
    lines = [line.split() for line in listed.output.splitlines()]
    assert lines[0] == ["cluster", "broker", "id", "address", "role", "version", "in/s", "out/s", "notes"]
    assert lines[1] == ["c", "g", "0", master, "master", "V4_9_7", "1.50", "7.25"]
    assert lines[2] == ["c", "g", "1", slave, "slave", "no"]
    assert lines[3][:6] == ["c", "g", "2", "127.0.0.1:1", "slave", "cannot"]
    brokers = json.loads(told.output)["brokers"]
    assert [(one["address"], one["is_master"], one["version"]) for one in brokers] == [
        (master, True, "V4_9_7"),
        (slave, False, ""),
        ("127.0.0.1:1", False, ""),
    ]


def test_no_master_is_exit_code_1(server: NameServer) -> None:
    """As without a name server."""
    assert (empty := run("--namesrv", server.address)).exit_code == 1
    assert "no broker has registered" in empty.output
    with calling(server) as caller:
        caller.register(1, "127.0.0.1:1")
        headless = run("--namesrv", server.address)

    assert headless.exit_code == 1
    assert "no master: g" in headless.output


def test_what_cannot_be_asked_is_told() -> None:
    """Nobody there, plaintext to elsewhere, certificates that are not there."""
    assert (down := run("--namesrv", "127.0.0.1:1")).exit_code == 1
    assert "cannot connect to 127.0.0.1:1" in down.output
    assert (remote := run("--namesrv", "10.0.0.1:9876")).exit_code == 2
    assert "--insecure" in remote.output
    assert (files := run("--namesrv", "10.0.0.1:9876", "--tls-ca", "/no/such/file")).exit_code == 2
    assert "/no/such/file" in files.output
    assert run("--namesrv", "nowhere").exit_code == 2
