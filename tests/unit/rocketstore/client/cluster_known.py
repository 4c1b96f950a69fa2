"""Two groups of fake brokers and the name server that knows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dledger.remoting.codes import AnswerCode
from rocketstore.remoting.codes import RequestCode
from tests.support.fake_broker import FakeBrokers, fake_brokers
from tests.unit.rocketstore.nameserver.wire import Caller, calling, config_in, running

TOPIC = "orders"


@dataclass(frozen=True)
class TwoGroups:
    """``a`` has two queues of the topic, ``b`` has one."""

    server: str
    caller: Caller
    a: FakeBrokers
    b: FakeBrokers

    def bodies(self) -> list[bytes]:
        """What both store."""
        return sorted(self.a.bodies(TOPIC) + self.b.bodies(TOPIC))

    def join(self, name: str) -> None:
        """A group's master registers."""
        group, queues = (self.a, 2) if name == "a" else (self.b, 1)
        self.caller.register(0, group.addresses[0], name=name, topics=(TOPIC,), queues=queues)

    def leave(self, name: str) -> None:
        """The name server does not know it any more."""
        address = (self.a if name == "a" else self.b).addresses[0]
        where = {"brokerName": name, "brokerAddr": address, "clusterName": "c", "brokerId": "0"}
        assert self.caller.ask(RequestCode.UNREGISTER_BROKER, **where).code == AnswerCode.SUCCESS


@contextmanager
def two_groups(directory: Path) -> Iterator[TwoGroups]:
    """Both, registered with their masters."""
    with fake_brokers(1) as a, fake_brokers(1) as b, running(config_in(directory)) as server, calling(server) as caller:
        a.add_topic(TOPIC, 2)
        b.add_topic(TOPIC, 1)
        known = TwoGroups(server.address, caller, a, b)
        for name in ("a", "b"):
            known.join(name)
        yield known
