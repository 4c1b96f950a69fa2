"""A console over a whole broker in this process, as a page uses it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.broker_target import BrokerTarget
from cluster.connection import GroupTarget
from cluster.console.server import ConsoleServer, ListenAddress
from cluster.security_options import CommandSecurity
from dledger.client.security import ClientSecurity
from dledger.config import AccessConfig
from rocketstore.client.admin import Admin
from rocketstore.client.producer import Producer
from rocketstore.client.topics import TopicInfo
from rocketstore.message.message import Message
from rocketstore.server import BrokerServer
from tests.support.waiting import wait_until
from tests.unit.cluster.console.support import Reply, request
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


@dataclass
class Desk:
    """A console, and an administrator's client for what it is about."""

    console: ConsoleServer
    admin: Admin
    address: str

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
        self.admin.put_topic(TopicInfo(name, queues, queues))
        with Producer([self.address], timeout_s=20) as producer:
            for queue_id, count in (messages or {}).items():
                for number in range(self._end(name, queue_id), count):
                    producer.send(Message(name, b"%d" % number), queue_id=queue_id)
        wait_until(lambda: all(self._end(name, one) == count for one, count in (messages or {}).items()), "dispatch")

    def _end(self, topic: str, queue_id: int) -> int:
        return self.admin.queue_range(topic, queue_id).max_offset


def console_at(address: str, security: CommandSecurity | None = None, **options: Any) -> ConsoleServer:  # noqa: ANN401
    target = GroupTarget((address,), "", 20.0)
    brokers = BrokerTarget(target.bootstrap, 20.0)
    if security is not None:
        target, brokers = replace(target, security=security), replace(brokers, security=security)
    return ConsoleServer(target, brokers, place=ListenAddress(port=0), **options)


@contextmanager
def plain_broker(root: Path) -> Iterator[BrokerServer]:
    """Without access control."""
    server = BrokerServer(plain(root)).start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def guarded_broker(root: Path) -> Iterator[str]:
    """The address of a broker with access control; ``T`` has two queues."""
    rules = root / "plain_acl.yml"
    rules.write_text(RULES)
    rules.chmod(0o600)
    server = BrokerServer(replace(plain(root), access=AccessConfig(acl_enable=True, acl_file=rules))).start()
    try:
        address = f"127.0.0.1:{server.port}"
        with Admin(
            [address], timeout_s=20, security=ClientSecurity(access_key="root", secret_key="root-secret")
        ) as admin:
            admin.put_topic(TopicInfo("T", 2, 2))
        yield address
    finally:
        server.stop()


@contextmanager
def desk_at(broker: BrokerServer) -> Iterator[Desk]:
    """A console of its own: the number of changes is limited."""
    address = f"127.0.0.1:{broker.port}"
    with Admin([address], timeout_s=20) as admin, console_at(address) as console:
        yield Desk(console, admin, address)
