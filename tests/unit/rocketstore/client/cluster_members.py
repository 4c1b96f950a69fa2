"""Two brokers of real services behind a real name server, and members of a group that know only that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dledger.remoting.codes import AnswerCode
from rocketstore.broker_config import BrokerConfig
from rocketstore.client.group_consumer import GroupConsumer
from rocketstore.client.group_options import GroupOptions
from rocketstore.client.shares import GroupDelivery, QueueName
from rocketstore.nameserver.server import NameServer
from rocketstore.pb import broker_pb2 as pb
from rocketstore.remoting.codes import RequestCode
from rocketstore.state.changes import TopicConfig
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness
from tests.unit.rocketstore.nameserver.wire import Caller, calling, config_in, running

TOPIC: Final = "T"
RETRIES: Final = "%RETRY%g"
GROUP: Final = "g"


class Known:
    """Brokers ``a`` and ``b``, each with ``queues`` of the topic. ``b`` has a connection of its own."""

    def __init__(self, server: NameServer, a: RemotingHarness, b: RemotingHarness, callers: dict[str, Caller]) -> None:
        self.server = server
        self.a, self.b = a, b
        self.brokers: Final = {"a": a, "b": b}
        self.callers = callers
        self._version = 0

    def register(self, *names: str, queues: int = 2) -> None:
        """Have the name server know these brokers."""
        for name in names:
            self._version += 1
            address = self.brokers[name].address
            topics = (TOPIC, RETRIES)
            self.callers[name].register(0, address, name=name, topics=topics, queues=queues, version=self._version)

    def forget(self, *names: str) -> None:
        """Have the name server know these brokers no more."""
        for name in names:
            address = self.brokers[name].address
            fields = {"brokerName": name, "brokerAddr": address, "clusterName": "c", "brokerId": "0"}
            assert self.callers[name].ask(RequestCode.UNREGISTER_BROKER, **fields).code == AnswerCode.SUCCESS

    def member(self, handler: Callable[[GroupDelivery], object] | None = None, **settings: object) -> GroupConsumer:
        """A member that has started, from the first message on unless ``settings`` say otherwise."""
        made = self.unstarted(**settings)
        made.start(handler)
        return made

    def unstarted(self, **settings: object) -> GroupConsumer:
        """A member that has only subscribed."""
        usual = {"start": "first", "timeout_s": 15.0, "commit_s": 0.05, "pull_wait_ms": 200}
        options = GroupOptions(**(usual | settings))  # type: ignore[arg-type]  # checked when made
        made = GroupConsumer(name_servers=self.server.address, group=GROUP, options=options)
        made.subscribe(TOPIC)
        return made

    def put(self, name: str, *bodies: bytes, queue_id: int = 0) -> None:
        """Store messages in one queue of a broker."""
        results = self.brokers[name].send(*(pb.Message(topic=TOPIC, body=one, queue_id=queue_id) for one in bodies))
        assert {one.status for one in results} <= {"PUT_OK"}

    def committed(self, name: str) -> dict[int, int]:
        """The group's offsets in the topic at a broker."""
        found = dict(self.brokers[name].state.committed)
        return {queue_id: offset for (_, topic, queue_id), offset in found.items() if topic == TOPIC}


@contextmanager
def two_brokers(directory: Path) -> Iterator[Known]:
    """Both have the topic, with two queues each."""
    topics = TopicConfig(TOPIC, 2, 2), TopicConfig(RETRIES, 2, 2)
    with (
        RemotingHarness(BrokerConfig(broker_name="a"), *topics) as a,
        RemotingHarness(BrokerConfig(broker_name="b"), *topics) as b,
        running(config_in(directory)) as server,
        calling(server) as first,
        calling(server) as second,
    ):
        known = Known(server, a, b, {"a": first, "b": second})
        known.register("a", "b")
        yield known


def queues_of(one: GroupConsumer) -> list[str]:
    """Of the topic, as ``a0``."""
    return [f"{each.broker_name}{each.queue_id}" for each in one.queues if each.topic == TOPIC]


def queue(text: str) -> QueueName:
    """Of the topic: ``a0``."""
    return QueueName(TOPIC, int(text[1:]), text[0])
