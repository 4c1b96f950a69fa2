"""RocketMQ's own integration tests, with its client, against two groups of three behind our name server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

import pytest

from cluster.local.brokers import LocalBrokers
from rocketstore.nameserver.errors import NameServerError
from rocketstore.nameserver.lookups import NameServers
from rocketstore.nameserver.server import NameServer
from rocketstore.remoting.blocking import BlockingRemotingClient
from tests.interop import java, rocketmq
from tests.support.waiting import wait_until
from tests.unit.rocketstore.nameserver.wire import config_in, running

pytestmark = pytest.mark.interop

CLUSTER: Final = "Interop"
BROKERS: Final = ("interop-a", "interop-b")
CONSUME_MS: Final = 120_000
"""How long a test of RocketMQ's waits for messages: machines differ."""
_PACKAGE: Final = "org.apache.rocketmq.test.client"
TESTS: Final = {
    "consumer.balance.NormalMsgDynamicBalanceIT": 2,
    "consumer.balance.NormalMsgStaticBalanceIT": 2,
    "consumer.broadcast.normal.BroadCastNormalMsgNotRecvIT": 1,
    "consumer.broadcast.normal.BroadCastNormalMsgRecvCrashIT": 1,
    "consumer.broadcast.normal.BroadCastNormalMsgRecvFailIT": 1,
    "consumer.broadcast.normal.BroadCastNormalMsgRecvStartLaterIT": 1,
    "consumer.broadcast.normal.BroadCastNormalMsgTwoDiffGroupRecvIT": 1,
    "consumer.broadcast.normal.NormalMsgTwoSameGroupConsumerIT": 1,
    "consumer.broadcast.tag.BroadCastTwoConsumerFilterIT": 1,
    "consumer.broadcast.tag.BroadCastTwoConsumerSubDiffTagIT": 1,
    "consumer.broadcast.tag.BroadCastTwoConsumerSubTagIT": 1,
}
"""Classes and how many tests each has. Left out: SqlFilterIT (no SQL92 filters here), OrderMsgBroadCastIT (RocketMQ
ignores it itself), DLedgerProduceAndConsumeIT (starts brokers of its own), and classes without a test."""


@pytest.fixture(scope="module")
def name_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NameServer]:
    java.build()
    with running(config_in(tmp_path_factory.mktemp("nameserver"), order_message_enable=True)) as started:
        yield started


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, name_server: NameServer) -> Iterator[None]:
    """Two groups, once both have a master that is registered."""
    settings = {"brokerClusterName": CLUSTER, "namesrvAddr": name_server.address, "transactionCheckInterval": "2000"}
    with ExitStack() as stack:
        for name in BROKERS:
            stack.enter_context(LocalBrokers(tmp_path_factory.mktemp(name), name=name, settings=settings))
        frames = stack.enter_context(closing(BlockingRemotingClient()))
        known = NameServers([name_server.address], frames)

        def all_lead() -> bool:
            try:
                table = known.clusters().broker_addr_table
            except NameServerError:
                return False
            return all(name in table and 0 in table[name].broker_addrs for name in BROKERS)

        wait_until(all_lead, "both groups have a master that is registered", 120)
        yield


@pytest.mark.parametrize("name", TESTS)
def test_it_passes(cluster: None, name_server: NameServer, tmp_path: Path, name: str) -> None:
    properties = {
        "ns": name_server.address,
        "cluster": CLUSTER,
        "brokers": ",".join(BROKERS),
        "consumeTime": CONSUME_MS,
    }
    printed = rocketmq.junit(tmp_path, f"{_PACKAGE}.{name}", properties)
    passed = re.search(r"^OK \((\d+) tests?\)$", printed, re.MULTILINE)
    assert passed is not None, printed[-20_000:]
    assert int(passed[1]) == TESTS[name]
