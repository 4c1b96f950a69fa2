"""A whole broker in this process, and a console over it, as a page uses it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dledger.client.shared import ClientSecurity
from dledger.config import AccessConfig
from dledger_cli.console.server import ConsoleServer, ListenAddress
from dledger_cli.targets import BrokerTarget, CommandSecurity, GroupTarget
from rocketstore.client import Admin, Message, MessageQueue, Producer, TopicInfo
from rocketstore.server import BrokerServer
from tests.support.waiting import wait_until
from tests.unit.dledger_cli.console.support import Reply, request
from tests.unit.rocketstore.test_server import plain

RULES = """accounts:
- accessKey: root
  secretKey: root-secret
  admin: true
- accessKey: alice
  secretKey: alice-secret
  defaultTopicPerm: SUB
  defaultGroupPerm: SUB
"""


class Broker:
    """A broker that is used by its administrator, and gets messages one by one."""

    def __init__(self, server: BrokerServer, security: ClientSecurity | None = None) -> None:
        self.server = server
        self.address = server.address
        self.addresses = [self.address]
        self.admin = Admin(self.address, timeout_s=60, security=security)
        self.producer = Producer(self.address, timeout_s=60, security=security)

    def stop(self) -> None:
        """With its clients. Idempotent."""
        self.producer.close()
        self.admin.close()
        self.server.stop()

    def add_topic(self, name: str, queues: int = 2, permission: int = 6) -> None:
        """Create it, or change it."""
        self.admin.put_topic(TopicInfo(name, queues, queues, permission))

    def put(self, message: Message, queue_id: int = 0) -> int:
        """Store it in this queue, later than the one before, and return when that was."""
        queue, store = (message.topic, queue_id), self.server.store
        end, last = store.max_offset(*queue), int(time.time() * 1000)
        wait_until(lambda: time.time() * 1000 > last + 1, "another millisecond")
        self.producer.send(message, queue=queue_id)
        wait_until(lambda: store.max_offset(*queue) == end + 1, "it is in its queue")
        return store.store_time(*queue, end)

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Let a group be there."""
        self.admin.set_offsets(group, {self.queue(topic, queue_id): offset})

    def bury(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Make a message a dead letter of a group."""
        position = self.server.store.position_of(topic, queue_id, offset)
        assert position is not None
        self.admin.send_back(group, topic, position, delay_level=-1, retries_max=0)

    def offsets(self, group: str) -> dict[tuple[str, int], int]:
        """A group's, by topic and queue."""
        return {(one.topic, one.queue_id): one.offset for one in self.server.state.offsets(group)}

    def about(self, topic: str) -> TopicInfo:
        """The topic as the broker has it now."""
        (found,) = [one for one in self.admin.topics() if one.name == topic]
        return replace(found, broker="")

    def queue(self, topic: str, queue_id: int) -> MessageQueue:
        """One of its queues."""
        return MessageQueue(topic, self.server.config.name, queue_id)


@dataclass
class GroupPage:
    """A console, and the broker that it is about."""

    console: ConsoleServer
    broker: Broker

    @property
    def admin(self) -> Admin:
        return self.broker.admin

    @property
    def address(self) -> str:
        return self.broker.address

    @property
    def session(self) -> dict[str, Any]:
        return request(f"{self.console.url}api/session").json()

    def do(self, change: str, **fields: object) -> Reply:
        """As the page asks for it."""
        return self.post(change, fields)

    def post(self, change: str, body: object, **headers: str) -> Reply:
        sent = {"x-csrf-token": self.session["csrf"], "content-type": "application/json"}
        sent |= {name.replace("_", "-"): text for name, text in headers.items()}
        return request(f"{self.console.url}api/do/{change}", method="POST", headers=sent, body=body)

    def get(self, path: str) -> dict[str, Any]:
        reply = request(f"{self.console.url}api/{path}")
        assert reply.status == 200, reply.body
        return reply.json()

    def events(self) -> list[tuple[str, str]]:
        """What happened: kinds and words."""
        return [(one["kind"], one["text"]) for one in self.get("state")["events"]]

    def topic(self, name: str, queues: int = 2, messages: Mapping[int, int] | None = None) -> None:
        """Create it, if it is not there, with so many messages in each queue."""
        self.broker.add_topic(name, queues)
        for queue_id, count in (messages or {}).items():
            for number in range(self.broker.server.store.max_offset(name, queue_id), count):
                self.broker.put(Message(name, b"%d" % number), queue_id)


def console_at(address: str, security: CommandSecurity | None = None, **options: Any) -> ConsoleServer:  # noqa: ANN401
    target = GroupTarget((address,), "", 20.0)
    brokers = BrokerTarget(target.bootstrap, 20.0)
    if security is not None:
        target, brokers = replace(target, security=security), replace(brokers, security=security)
    return ConsoleServer(target, brokers, place=ListenAddress(port=0), **options)


@contextmanager
def plain_broker(root: Path) -> Iterator[Broker]:
    """Without access control."""
    broker = Broker(BrokerServer(plain(root)).start())
    try:
        yield broker
    finally:
        broker.stop()


@contextmanager
def guarded_broker(root: Path) -> Iterator[Broker]:
    """A broker with access control; ``T`` has two queues."""
    rules = root / "plain_acl.yml"
    rules.write_text(RULES)
    rules.chmod(0o600)
    server = BrokerServer(replace(plain(root), access=AccessConfig(acl_enable=True, acl_file=rules))).start()
    broker = Broker(server, ClientSecurity(access_key="root", secret_key="root-secret"))
    try:
        broker.add_topic("T")
        yield broker
    finally:
        broker.stop()


@contextmanager
def group_page_at(broker: Broker, security: CommandSecurity | None = None, **options: Any) -> Iterator[GroupPage]:  # noqa: ANN401
    """A console of its own: the number of changes is limited."""
    with console_at(broker.address, security, **options) as console:
        yield GroupPage(console, broker)
