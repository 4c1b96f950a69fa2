"""Two groups of fake brokers and the name server that knows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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


@contextmanager
def two_groups(directory: Path) -> Iterator[TwoGroups]:
    """Both, registered with their masters."""
    with fake_brokers(1) as a, fake_brokers(1) as b, running(config_in(directory)) as server, calling(server) as caller:
        a.add_topic(TOPIC, 2)
        b.add_topic(TOPIC, 1)
        caller.register(0, a.addresses[0], name="a", topics=(TOPIC,), queues=2)
        caller.register(0, b.addresses[0], name="b", topics=(TOPIC,), queues=1)
        yield TwoGroups(server.address, caller, a, b)
