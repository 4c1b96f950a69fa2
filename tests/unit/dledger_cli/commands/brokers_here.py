"""Whole brokers in this process, and ``dledger`` commands at them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner, Result

from dledger_cli import cli
from rocketstore.client.blocking import Admin, Producer
from rocketstore.client.loop_thread import ClientThread
from rocketstore.message.message import Message
from rocketstore.remoting.topics import MessageQueue
from rocketstore.server import BrokerServer
from tests.support.scripted_server import ScriptedServer, Topics
from tests.support.waiting import wait_until
from tests.unit.rocketstore.nameserver import wire
from tests.unit.rocketstore.test_server import plain, running

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Here:
    """Brokers by name, and the variables of the environment by which commands find them."""

    brokers: dict[str, BrokerServer]
    environment: dict[str, str]

    def run(self, *words: str, stdin: bytes | None = None) -> Result:
        """``dledger`` with these words."""
        return CliRunner().invoke(cli.main, list(words), input=stdin, prog_name="dledger", env=self.environment)

    def rows(self, *words: str) -> list[list[str]]:
        """What a command prints below its heading."""
        shown = self.run(*words)
        assert shown.exit_code == 0, shown.output
        return [line.split() for line in shown.stdout.splitlines()[1:]]

    def put(self, broker: str, topic: str, *messages: Message, queue: int = 0) -> list[str]:
        """Store messages in a queue; returns their offset ids, once they are in the queue and the index."""
        server = self.brokers[broker]
        with Producer(server.address, timeout_s=TIMEOUT_S) as producer:
            place = MessageQueue(topic, broker, queue)
            ids = [producer.send(one, queue=place).offset_id for one in messages]
        store = server.store
        position = int(ids[-1][-16:], 16)
        wait_until(
            lambda: store.position_of(topic, queue, store.max_offset(topic, queue) - 1) == position, "in its queue"
        )
        if any(one.keys for one in messages):
            wait_until(lambda: store.index_end().offset >= position, "in the index")
        return ids


@contextmanager
def one_broker(directory: Path) -> Iterator[Here]:
    """A plain one, found by its address."""
    with running(plain(directory)) as server:
        yield Here({server.config.name: server}, {"DLEDGER_BROKER": server.address})


@contextmanager
def two_brokers(directory: Path) -> Iterator[Here]:
    """``a`` and ``b``, found by a name server."""
    with ExitStack() as stack:
        names = stack.enter_context(wire.running(wire.config_in(directory / "names")))
        brokers = {
            name: stack.enter_context(running(plain(directory / name, namesrvAddr=names.address, brokerName=name)))
            for name in "ab"
        }
        with Admin(name_servers=names.address, timeout_s=TIMEOUT_S) as admin:
            wait_until(lambda: [one.name for one in admin.brokers()] == ["a", "b"], "both have registered")
        yield Here(brokers, {"DLEDGER_NAMESRV": names.address})


@contextmanager
def scripted(topics: Mapping[str, Mapping[str, int]] | None = None) -> Iterator[ScriptedServer]:
    """A broker ``a`` that tells where it and these topics are, and nothing else."""
    thread = ClientThread()
    server = ScriptedServer()
    thread.run(server.start())
    Topics({"a": {0: server.address}}, topics or {}).serve(server)
    try:
        yield server
    finally:
        thread.run(server.stop())
        thread.stop()
