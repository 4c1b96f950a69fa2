"""Members of a consumer group share the queues of two groups of brokers, whatever happens to members and masters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from dledger.errors import DLedgerError
from dledger_cli.local.brokers import LocalBrokers
from rocketstore.client import Admin, Message, Producer, TopicInfo
from tests.support.running_consumer import RunningConsumer
from tests.support.waiting import wait_until
from tests.unit.rocketstore.nameserver.wire import config_in, running

TOPIC = "orders"
GROUP = "people"
ALL = [f"{name}{number}" for name in "ab" for number in range(4)]
TIMEOUT_S = 60


class Cluster:
    """``a`` is three brokers with a master, ``b`` a plain one."""

    def __init__(self, name_server: str, a: LocalBrokers, b: LocalBrokers) -> None:
        self.name_server = name_server
        self.a, self.b = a, b

    def lag(self) -> int:
        """Messages not committed yet, of both."""
        with Admin(name_servers=self.name_server, timeout_s=60.0) as admin:
            return admin.lag(GROUP, TOPIC)

    def consume(self, file: Path) -> subprocess.Popen[bytes]:
        """A member that is a command of its own."""
        words = ["message", "consume", "-t", TOPIC, "-g", GROUP, "--follow", "--from", "first"]
        command = [sys.executable, "-m", "dledger_cli.entry", *words]
        with file.open("wb") as stream:
            return subprocess.Popen(command, stdout=stream, env=os.environ | {"DLEDGER_NAMESRV": self.name_server})


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        server = stack.enter_context(running(config_in(tmp_path)))
        settings = {"mappedFileSizeCommitLog": "16m", "namesrvAddr": server.address}
        a = stack.enter_context(LocalBrokers(tmp_path / "a", name="a", settings=settings))
        b = stack.enter_context(LocalBrokers(tmp_path / "b", size=1, plain=True, name="b", settings=settings))
        for one in (a, b):
            one.master()
            with one.admin(20.0) as admin:
                admin.put_topic(TopicInfo(TOPIC, 4, 4))

        def is_known() -> bool:
            with Admin(name_servers=server.address) as admin:
                try:
                    return sorted(one.broker for one in admin.topic(TOPIC)) == ["a", "b"]
                except DLedgerError:
                    return False

        wait_until(is_known, "the topic is known to be in both", TIMEOUT_S)
        yield Cluster(server.address, a, b)


class Member(RunningConsumer):
    """``mine``: its queues, by the brokers' name and number."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(None, GROUP, TOPIC, name_servers=cluster.name_server)

    @property
    def mine(self) -> list[str]:
        return [f"{name}{number}" for name, number in self.queues]


class Load:
    """Sends to both groups until told to stop; ``sent``: what was acknowledged."""

    def __init__(self, cluster: Cluster) -> None:
        self.sent: list[str] = []
        self._cluster = cluster
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Send no more."""
        self._stop.set()
        self._thread.join()

    def more(self, count: int = 100) -> None:
        """Wait until so many further messages are acknowledged."""
        enough = len(self.sent) + count
        wait_until(lambda: len(self.sent) >= enough, "messages are acknowledged", TIMEOUT_S)

    def _run(self) -> None:
        with Producer(name_servers=self._cluster.name_server, timeout_s=1.0) as producer:
            number = 0
            while not self._stop.wait(0.005):
                number += 1
                with suppress(DLedgerError):
                    producer.send(Message(TOPIC, b"%d" % number))
                    self.sent.append(str(number))


def test_members_share_the_queues_while_members_and_a_master_die(cluster: Cluster, tmp_path: Path) -> None:
    """And one hangs for a while. Nothing is missed; each queue has one owner again; all is committed where it is."""
    file = tmp_path / "printed"
    with Member(cluster) as one, Member(cluster) as two, Load(cluster) as load:

        def owners() -> list[str]:
            return sorted(one.mine + two.mine)

        wait_until(lambda: owners() == ALL and len(one.mine) == 4, "two members share", TIMEOUT_S)
        load.more()
        third = cluster.consume(file)
        try:
            wait_until(lambda: len(one.mine) + len(two.mine) in (5, 6), "a third has a share", TIMEOUT_S)
            wait_until(lambda: bool(file.read_text()), "and consumes it", TIMEOUT_S)
            third.send_signal(signal.SIGSTOP)
            load.more()
            third.send_signal(signal.SIGCONT)
            master = cluster.a.master()
            cluster.a.kill(master)
            load.more()  # b's, at least
            cluster.a.master(other_than=master)
            cluster.a.start(master)
            load.more()
            assert third.poll() is None
        finally:
            third.kill()
            third.wait()
        wait_until(lambda: owners() == ALL and len(one.mine) == 4, "the others have its share", TIMEOUT_S)
        load.more()
        load.stop()

        def seen() -> set[str]:
            return {*one.bodies, *two.bodies, *file.read_text().split()}

        wait_until(lambda: seen() >= set(load.sent), "all came", TIMEOUT_S)
        wait_until(lambda: cluster.lag() == 0, "all is committed", TIMEOUT_S)
        wait_until(lambda: owners() == ALL, "each queue has one owner", TIMEOUT_S)


def test_brokers_that_die_hold_up_only_their_own_queues(cluster: Cluster) -> None:
    """Members come and go meanwhile; when the brokers are back, their queues are consumed from where they were."""
    with Member(cluster) as one:
        node = cluster.b.master()
        with Load(cluster) as load:
            load.more()
            cluster.b.kill(node)
            load.more()
            with Member(cluster) as two:
                wait_until(lambda: {each[0] for each in one.mine + two.mine} >= {"a"}, "they share", TIMEOUT_S)
                load.more()
                at_a = {name for name in ALL if name[0] == "a"}
                wait_until(lambda: set(one.mine + two.mine) >= at_a, "a's queues have owners", TIMEOUT_S)
            cluster.b.start(node)
            load.more()
        wait_until(lambda: one.mine == ALL, "all queues have an owner", TIMEOUT_S)
        wait_until(lambda: {*one.bodies, *two.bodies} >= set(load.sent), "all came", TIMEOUT_S)
        wait_until(lambda: cluster.lag() == 0, "all is committed", TIMEOUT_S)
