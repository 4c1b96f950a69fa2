"""RocketMQ's transactional producer while masters of a group are killed: each transaction ends once, as it says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from cluster.local.brokers import LocalBrokers
from dledger.errors import DLedgerError
from rocketstore.client import Admin
from rocketstore.nameserver.errors import NameServerError
from rocketstore.nameserver.lookups import NameServers
from rocketstore.nameserver.server import NameServer
from rocketstore.remoting.blocking import BlockingRemotingClient
from tests.interop import java, rocketmq
from tests.support.waiting import wait_until
from tests.unit.rocketstore.nameserver.wire import config_in, running

pytestmark = pytest.mark.interop

TOPIC: Final = "Transactions"
LOAD_S: Final = 30
KILLS: Final = 3
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


def _none_open(admin: Admin) -> bool:
    try:
        told = admin.status().runtime
    except DLedgerError:
        return False
    return (told.get("transactionsReady"), told.get("transactionsOpen")) == ("true", "0")


def test_each_transaction_ends_once_whoever_dies(tmp_path: Path, name_server: NameServer) -> None:
    settings = {"namesrvAddr": name_server.address, **SETTINGS}
    with (
        LocalBrokers(tmp_path / "brokers", name="transactions", settings=settings) as brokers,
        closing(BlockingRemotingClient()) as frames,
        brokers.admin() as admin,
    ):
        known = NameServers([name_server.address], frames)

        def master() -> str:
            try:
                return known.clusters().broker_addr_table["transactions"].broker_addrs.get(0, "")
            except (NameServerError, KeyError):
                return ""

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
            wait_until(lambda: _none_open(admin), "all transactions have ended", 120)
            acknowledged = {int(line.split()[0]) for line in printed() if not line.startswith("done")}
        count = _stored(admin)
        found: Counter[int] = Counter()
        with brokers.consumer("check", TOPIC) as consumer:
            while found.total() < count:
                found.update(int(one.body) for one in consumer.poll())
    assert max(found.values()) == 1, found.most_common(3)
    assert not [number for number in found if number % 2], "rolled back, and delivered"
    assert {number for number in acknowledged if number % 2 == 0} <= found.keys(), "committed, and lost"
    assert len(acknowledged) > 100
