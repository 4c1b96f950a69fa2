"""RocketMQ's transactional producer while masters of a group are killed: each transaction ends once, as it says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from dledger.errors import DLedgerError
from dledger_cli.local.brokers import LocalBrokers
from rocketstore.client import Admin, Message, PreparedMessage, Producer, TopicInfo, TransactionState
from rocketstore.nameserver.server import NameServer
from tests.interop import java, rocketmq
from tests.support import known
from tests.support.waiting import wait_until
from tests.unit.rocketstore.nameserver.wire import config_in, running

pytestmark = pytest.mark.interop

TOPIC: Final = "Transactions"
GROUP: Final = "interop-transactions"
LOAD_S: Final = 30
KILLS: Final = 3
PYTHONS: Final = 1_000_000
"""The first number of what is sent in Python."""
SETTINGS: Final = {"transactionCheckInterval": "1000", "transactionTimeOut": "500", "transactionCheckMax": "1000"}


@pytest.fixture
def name_server(tmp_path: Path) -> Iterator[NameServer]:
    java.build()
    with running(config_in(tmp_path)) as started:
        yield started


def _stored(admin: Admin) -> int:
    """How many messages the topic has."""
    try:
        return sum(one.max_offset for one in admin.queue_ranges(TOPIC))
    except DLedgerError:  # it does not exist yet
        return 0


def _none_open(brokers: LocalBrokers) -> bool:
    """Of the master: others do not know."""
    told = (status.table for status in brokers.broker_statuses().values() if status.runtime.is_master)
    return any((one.get("transactionsReady"), one.get("transactionsOpen")) == ("true", "0") for one in told)


def test_each_transaction_ends_once_whoever_dies(tmp_path: Path, name_server: NameServer) -> None:
    settings = {"namesrvAddr": name_server.address, **SETTINGS}
    with (
        LocalBrokers(tmp_path / "brokers", name="transactions", settings=settings) as brokers,
        brokers.admin() as admin,
    ):

        def master() -> str:
            return known.brokers(name_server.address).get("transactions", {}).get(0, "")

        wait_until(lambda: bool(master()), "the master is registered", 60)
        arguments = ("transact", name_server.address, TOPIC, str(LOAD_S))
        with rocketmq.open_client(tmp_path / "client", *arguments) as printed:
            wait_until(lambda: _stored(admin) > 0, "messages are committed", 60)
            for _ in range(KILLS):
                killed = brokers.master()
                brokers.kill(killed)
                brokers.master(other_than=killed)
                brokers.start(killed)
                wait_until(lambda: all(brokers.is_running(node) for node in brokers.nodes), "all run again", 60)
            wait_until(lambda: "done 0" in printed(), "the producer has sent everything", 120)
            wait_until(lambda: _none_open(brokers), "all transactions have ended", 120)
            acknowledged = _numbers(printed)
        count = _stored(admin)
        found: Counter[int] = Counter()
        with brokers.consumer("check", TOPIC) as consumer:
            while found.total() < count:
                found.update(int(one.body) for one in consumer.poll())
    assert max(found.values()) == 1, found.most_common(3)
    assert not [number for number in found if number % 2], "rolled back, and delivered"
    assert {number for number in acknowledged if number % 2 == 0} <= found.keys(), "committed, and lost"
    assert len(acknowledged) > 100


def test_java_and_python_producers_answer_for_each_other(tmp_path: Path, name_server: NameServer) -> None:
    """Who prepared a transaction is asked, and once it is gone, the other member of its group; each ends once."""
    unsure: set[int] = set()
    asked: set[int] = set()

    def hesitate(prepared: PreparedMessage) -> TransactionState:
        unsure.add(int(prepared.message.body))
        return TransactionState.UNKNOWN

    def check(prepared: PreparedMessage) -> TransactionState:
        number = int(prepared.message.body)
        asked.add(number)
        return TransactionState.ROLLBACK if number % 2 else TransactionState.COMMIT

    settings = {"namesrvAddr": name_server.address, **SETTINGS}
    with (
        LocalBrokers(tmp_path / "brokers", size=1, name="transactions", settings=settings) as brokers,
        brokers.admin() as admin,
    ):
        brokers.master()
        admin.put_topic(TopicInfo(TOPIC, 4, 4))
        arguments = ("transact", name_server.address, TOPIC)
        with rocketmq.open_client(tmp_path / "client", *arguments, "10") as printed:
            wait_until(lambda: _stored(admin) > 0, "messages of the Java producer are committed", 60)
            ours = range(PYTHONS, PYTHONS + 100)
            with Producer(name_servers=name_server.address, group=GROUP, check=hesitate) as producer:
                for number in ours:
                    message = Message(TOPIC, b"%d" % number)
                    assert producer.send_in_transaction(message, lambda _: TransactionState.UNKNOWN).problem is None
                wait_until(lambda: unsure >= set(ours), "the Python producer is asked about all it has left open", 60)
            wait_until(lambda: "done 0" in printed(), "the Java producer has sent everything", 120)
            wait_until(lambda: _none_open(brokers), "the Java producer has ended all transactions", 120)
            theirs = _numbers(printed)
        assert unsure == set(ours), "while both are connected, each is asked about its own"

        with Producer(name_servers=name_server.address, group=GROUP, check=check):
            with rocketmq.open_client(tmp_path / "killed", *arguments, "600") as printed:
                wait_until(lambda: len(_numbers(printed)) > 100, "another Java producer has prepared messages", 60)
            killed = _numbers(printed)
            wait_until(lambda: _none_open(brokers), "the Python producer has ended what the killed one left", 120)
        count = _stored(admin)
        found: Counter[int] = Counter()
        with brokers.consumer("check", TOPIC) as consumer:
            while found.total() < count:
                found.update(int(one.body) for one in consumer.poll())
    expected = Counter(number for numbers in (theirs, ours, killed) for number in numbers if number % 2 == 0)
    assert not expected - found, "committed, and lost"
    assert set(found - expected) <= {max(killed) + 1}, "rolled back or ended twice"  # the last one was not printed
    assert {number for number in asked if number % 4 > 1}, "Python answers for Java"
    assert asked <= {*killed, max(killed) + 1}


def _numbers(printed: Callable[[], list[str]]) -> set[int]:
    """What the Java producer has prepared, and said so."""
    return {int(line.split()[0]) for line in printed() if not line.startswith("done")}
