"""Two groups of brokers behind one name server: a cluster that grows, and outlives the loss of a group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from click.testing import CliRunner

from dledger_cli import cli
from dledger_cli.local.brokers import LocalBrokers
from rocketstore.client import Admin, BrokerUnreachableError, Consumer, Message, NotFoundError, Producer
from tests.support.waiting import wait_until
from tests.unit.rocketstore.nameserver.wire import config_in, running

TIMEOUT_S = 60
TOPIC = "orders"


def test_a_topic_is_spread_over_two_brokers(tmp_path: Path) -> None:
    """Nobody but the brokers knows an address other than the name server's; each message arrives once."""
    with running(config_in(tmp_path)) as server:
        settings = {"mappedFileSizeCommitLog": "16m", "namesrvAddr": server.address}

        def started(name: str) -> LocalBrokers:
            return LocalBrokers(tmp_path / name, size=1, plain=True, name=name, settings=settings)

        def run(*words: str) -> str:
            done = CliRunner().invoke(cli.main, list(words), env={"DLEDGER_NAMESRV": server.address})
            assert done.exit_code == 0, done.output
            return done.stdout

        def asking(ask: Callable[[Admin], list[str]]) -> list[str]:
            with Admin(name_servers=server.address) as admin:
                try:
                    return ask(admin)
                except (BrokerUnreachableError, NotFoundError):  # nothing has registered yet
                    return []

        def names() -> list[str]:
            return asking(lambda admin: [one.name for one in admin.brokers() if one.master])

        def places() -> list[str]:
            return asking(lambda admin: sorted(one.broker for one in admin.topic(TOPIC)))

        with started("a"):
            wait_until(lambda: names() == ["a"], "the first has registered", TIMEOUT_S)
            run("topic", "create", TOPIC)
            with started("b") as second:
                wait_until(lambda: names() == ["a", "b"], "the second has registered", TIMEOUT_S)
                run("topic", "create", TOPIC, "--broker-name", "b")
                wait_until(lambda: places() == ["a", "b"], "the topic is in both", TIMEOUT_S)
                sent = {b"%d" % number for number in range(40)}
                with Producer(name_servers=server.address) as producer:
                    for body in sorted(sent):
                        producer.send(Message(TOPIC, body))
                    run("message", "send", "-t", TOPIC, "from the command line")
                    sent.add(b"from the command line")
                second.kill(second.master())  # without unregistering
                with Producer(name_servers=server.address) as producer:
                    for number in range(40, 50):
                        producer.send(Message(TOPIC, b"%d" % number))
                        sent.add(b"%d" % number)
                second.start(next(iter(second.nodes)))

                received: list[bytes] = []
                with Consumer(name_servers=server.address, group="billing", topics=TOPIC, start="first") as consumer:

                    def is_complete() -> bool:
                        received.extend(one.body for one in consumer.poll(timeout_s=1.0))
                        return len(received) >= len(sent)

                    wait_until(is_complete, "all have come", TIMEOUT_S, poll_s=0)
                assert sorted(received) == sorted(sent)
                rows = [line.split() for line in run("topic", "status", TOPIC).splitlines()[1:]]
                ends = {(row[0], int(row[1])): int(row[3]) for row in rows}
                assert len(ends) == 8
                assert min(ends.values()) >= 5  # each queue had its turn
                assert run("consumer", "progress").split()[-1] == "0"
