"""RocketMQ's consumers and ours in one consumer group share the queues of two groups of brokers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from dledger_cli.local.brokers import LocalBrokers
from rocketstore.client import Admin, ConsumedMessage, Message, MessageQueue, NotFoundError, Producer, TopicInfo
from tests.interop import java, rocketmq
from tests.support.running_consumer import RunningConsumer
from tests.support.waiting import wait_until
from tests.unit.rocketstore.nameserver.wire import config_in, running

pytestmark = pytest.mark.interop

TOPIC: Final = "Shared"
GROUP: Final = "interop-consumers"
ALL: Final = [f"{name}{number}" for name in "ab" for number in range(3)]
TIMEOUT_S: Final = 90


@pytest.fixture
def name_server(tmp_path: Path) -> Iterator[str]:
    """It knows the topic at three brokers named ``a``, one of them the master, and at one named ``b``."""
    java.build()
    with ExitStack() as stack:
        server = stack.enter_context(running(config_in(tmp_path)))
        settings = {"mappedFileSizeCommitLog": "16m", "namesrvAddr": server.address}
        for size, name in ((3, "a"), (1, "b")):
            brokers = LocalBrokers(tmp_path / name, size=size, plain=size == 1, name=name, settings=settings)
            stack.enter_context(brokers).master()
            with brokers.admin(20.0) as admin:
                admin.put_topic(TopicInfo(TOPIC, 3, 3))

        def is_known() -> bool:
            with Admin(name_servers=server.address) as admin:
                try:
                    return sorted(one.broker for one in admin.topic(TOPIC)) == ["a", "b"]
                except NotFoundError:
                    return False

        wait_until(is_known, "the topic is known to be in both", TIMEOUT_S)
        yield server.address


class Member(RunningConsumer):
    """``lines``: what it got, and from where, as the Java program prints it."""

    def __init__(self, name_server: str) -> None:
        self.lines: list[str] = []
        super().__init__(None, GROUP, TOPIC, name_servers=name_server)

    def _take(self, message: ConsumedMessage) -> None:
        self.lines.append(f"{message.body.decode()} {message.queue.broker_name}{message.queue.queue_id}")

    @property
    def mine(self) -> list[str]:
        return sorted(f"{name}{number}" for name, number in self.queues)


class Rounds:
    """Sends a message to every queue, again and again."""

    def __init__(self, name_server: str) -> None:
        self._name_server = name_server
        self._count = 0

    def send(self) -> list[str]:
        """The bodies of one round."""
        self._count += 1
        bodies = [f"{self._count}-{place}" for place in ALL]
        with Producer(name_servers=self._name_server, timeout_s=20.0) as producer:
            for place, body in zip(ALL, bodies, strict=True):
                producer.send(Message(TOPIC, body.encode()), queue=MessageQueue(TOPIC, place[0], int(place[1:])))
        return bodies

    def owners(self, *members: Callable[[], list[str]]) -> list[list[str]]:
        """By member, the queues of one round's messages. Each comes to one member, and none is missed."""
        bodies = self.send()

        def received() -> list[list[str]]:
            prefix = f"{self._count}-"
            return [[line for line in printed() if line.startswith(prefix)] for printed in members]

        wait_until(lambda: sum(map(len, received())) >= len(bodies), "a round arrives", TIMEOUT_S)
        places = [sorted({line.split()[1] for line in lines}) for lines in received()]
        return places if sum(map(len, places)) == len(ALL) else [["several owners"]]


def test_java_and_python_share_the_queues_of_all_brokers(tmp_path: Path, name_server: str) -> None:
    """Runs of the same list, also after one of either kind was killed or has left."""
    rounds = Rounds(name_server)
    halves = [ALL[:3], ALL[3:]]
    with Member(name_server) as one:
        with rocketmq.open_client(tmp_path / "java", "share", name_server, TOPIC, "0") as printed:
            wait_until(lambda: one.mine in halves, "ours has one half", TIMEOUT_S)
            wait_until(
                lambda: sorted(rounds.owners(lambda: one.lines, printed)) == halves,
                "Java's has the other",
                TIMEOUT_S,
                poll_s=0.5,
            )
            with Member(name_server) as two:
                thirds = [ALL[:2], ALL[2:4], ALL[4:]]
                wait_until(lambda: one.mine in thirds and two.mine in thirds, "ours have a third each", TIMEOUT_S)
                wait_until(
                    lambda: sorted(rounds.owners(lambda: one.lines, lambda: two.lines, printed)) == thirds,
                    "Java's has one, too",
                    TIMEOUT_S,
                    poll_s=0.5,
                )
        wait_until(lambda: one.mine == ALL, "Java's was killed", TIMEOUT_S)
        assert rounds.owners(lambda: one.lines) == [ALL]
        with rocketmq.open_client(tmp_path / "java", "share", name_server, TOPIC, "0") as printed:
            wait_until(lambda: one.mine in halves, "another has half", TIMEOUT_S)
            one.close()
            wait_until(
                lambda: rounds.owners(printed) == [ALL],
                "ours has left, and Java's has all",
                TIMEOUT_S,
                poll_s=0.5,
            )
