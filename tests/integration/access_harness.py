"""Groups of real nodes and brokers with access control, and a load of somebody who may."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from dledger.client import ClientSecurity, DLedgerClient
from dledger.errors import DLedgerError
from rocketstore.client import Admin, Consumer, Message, Producer, ProducerOptions
from tests.integration.broker_harness import BrokerGroup
from tests.integration.harness import STEADY, Group, WatchedGroup
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from typing import Unpack

    from rocketstore.client.aio.consumer_options import ConsumerSettings

ROOT: Final = ClientSecurity(access_key="root", secret_key="root-secret")
ALICE: Final = ClientSecurity(access_key="alice", secret_key="alice-secret")
BOB: Final = ClientSecurity(access_key="bob", secret_key="bob-secret")
NOBODY: Final = ClientSecurity()
RULES: Final = """\
accounts:
- accessKey: root
  secretKey: root-secret
  admin: true
- accessKey: alice
  secretKey: alice-secret
  topicPerms:
  - default=PUB|SUB
  - orders=PUB|SUB
  groupPerms:
  - billing=SUB
- accessKey: bob
  secretKey: bob-secret
  topicPerms:
  - paid=SUB
"""


class Rules:
    """The rules file of a group."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.file = directory / "plain_acl.yml"
        self.write(RULES)

    def write(self, text: str) -> None:
        """As an editor does it."""
        new = self.file.with_suffix(".new")
        new.touch(0o600)
        new.write_text(text)
        new.replace(self.file)

    @property
    def settings(self) -> dict[str, str]:
        """For every node."""
        return {"acl_enable": "true", "acl_file": str(self.file)}


class SecuredGroup(Group):
    """Nodes; whatever the harness asks, an administrator asks."""

    def __init__(
        self, directory: Path, *, size: int = 3, settings: Mapping[str, str] | None = None, tls: bool = False
    ) -> None:
        self.rules = Rules(directory)
        super().__init__(directory, size=size, settings={**STEADY, **self.rules.settings, **(settings or {})}, tls=tls)

    @property
    def security(self) -> ClientSecurity:
        return self.of(ROOT)

    def of(self, who: ClientSecurity) -> ClientSecurity:
        """Somebody's keys, over TLS where the group speaks it."""
        return replace(who, tls=self.tls.client().tls) if self.tls is not None else who

    def client(self, timeout_s: float = 30.0, *, security: ClientSecurity = ROOT) -> DLedgerClient:
        """With somebody's key."""
        return DLedgerClient(self.addresses, group=self.name, timeout_s=timeout_s, security=self.of(security))


class SecuredBrokers(BrokerGroup):
    """Brokers; whatever the harness asks, an administrator asks."""

    def __init__(
        self, directory: Path, *, size: int = 3, plain: bool = False, settings: Mapping[str, str] | None = None
    ) -> None:
        self.rules = Rules(directory)
        super().__init__(
            directory, size=size, plain=plain, settings={**STEADY, **self.rules.settings, **(settings or {})}
        )

    @property
    def security(self) -> ClientSecurity:
        return ROOT

    def admin(self, timeout_s: float = 30.0, *, security: ClientSecurity = ROOT) -> Admin:
        return Admin(self.addresses, timeout_s=timeout_s, security=security)

    def producer(
        self, timeout_s: float = 30.0, *, allow_duplicates: bool = False, security: ClientSecurity = ROOT
    ) -> Producer:
        options = ProducerOptions(allow_duplicates=allow_duplicates)
        return Producer(self.addresses, timeout_s=timeout_s, security=security, options=options)

    def consumer_of(
        self, security: ClientSecurity, group: str, topic: str, **options: Unpack[ConsumerSettings]
    ) -> Consumer:
        """With somebody's key."""
        options.setdefault("start", "first")
        assign: Literal["all"] | None = None if group else "all"
        return Consumer(self.addresses, group=group, topics=topic, assign=assign, security=security, **options)


@contextmanager
def unharmed(group: WatchedGroup) -> Iterator[Load]:
    """Alice's entries or messages are acknowledged before, meanwhile and after it; nobody is elected."""
    term, leader = group.term(), group.leader()
    load = Load(group)
    try:
        load.wait_for(5)
        yield load
        load.wait_for(20)
    finally:
        load.stop()
    assert load.failures == [], load.failures
    assert group.term() == term, "it cost an election"
    assert group.leader() == leader


class Load:
    """Alice appends or sends, one after the other, until it is stopped."""

    def __init__(self, group: WatchedGroup) -> None:
        self.acknowledged = 0
        self.failures: list[DLedgerError] = []
        self._group = group
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait_for(self, count: int) -> None:
        """Wait for that many more."""
        goal = self.acknowledged + count
        wait_until(lambda: self.acknowledged >= goal or bool(self.failures), f"{count} more are acknowledged")

    def stop(self) -> None:
        """End it."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        if isinstance(self._group, SecuredBrokers):
            with self._group.producer(10, security=ALICE) as producer:
                self._repeat(lambda: producer.send(Message("orders", b"load"), queue=0))
        elif isinstance(self._group, SecuredGroup):
            with closing(self._group.client(10, security=ALICE)) as client:
                self._repeat(lambda: client.append(b"load %d" % self.acknowledged))

    def _repeat(self, work: Callable[[], object]) -> None:
        while not self._stop.wait(0.002):
            try:
                work()
            except DLedgerError as error:
                self.failures.append(error)
                return
            self.acknowledged += 1
