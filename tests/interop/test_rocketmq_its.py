"""RocketMQ's own integration tests, with its client, against two groups of three behind our name server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from dledger.config import ClientAuth, SecurityConfig
from dledger.types import NodeId, TlsServerMode
from dledger_cli.local.brokers import LocalBrokers
from dledger_cli.local.group import LocalTls
from rocketstore.nameserver.server import NameServer
from tests.interop import java, rocketmq
from tests.support import known
from tests.support.waiting import wait_until
from tests.unit.rocketstore.nameserver.wire import config_in, running

pytestmark = pytest.mark.interop

CLUSTER: Final = "Interop"
BROKERS: Final = ("interop-a", "interop-b")
CONSUME_MS: Final = 120_000
"""How long a test of RocketMQ's waits for messages: machines differ."""
_PACKAGE: Final = "org.apache.rocketmq.test"
TESTS: Final = {
    "client.consumer.balance.NormalMsgDynamicBalanceIT": 2,
    "client.consumer.balance.NormalMsgStaticBalanceIT": 2,
    "client.consumer.broadcast.normal.BroadCastNormalMsgNotRecvIT": 1,
    "client.consumer.broadcast.normal.BroadCastNormalMsgRecvCrashIT": 1,
    "client.consumer.broadcast.normal.BroadCastNormalMsgRecvFailIT": 1,
    "client.consumer.broadcast.normal.BroadCastNormalMsgRecvStartLaterIT": 1,
    "client.consumer.broadcast.normal.BroadCastNormalMsgTwoDiffGroupRecvIT": 1,
    "client.consumer.broadcast.normal.NormalMsgTwoSameGroupConsumerIT": 1,
    "client.consumer.broadcast.tag.BroadCastTwoConsumerFilterIT": 1,
    "client.consumer.broadcast.tag.BroadCastTwoConsumerSubDiffTagIT": 1,
    "client.consumer.broadcast.tag.BroadCastTwoConsumerSubTagIT": 1,
    "client.consumer.cluster.DynamicAddAndCrashIT": 2,
    "client.consumer.cluster.DynamicAddConsumerIT": 2,
    "client.consumer.cluster.DynamicCrashConsumerIT": 2,
    "client.consumer.filter.SqlFilterIT": 2,
    "client.consumer.tag.MulTagSubIT": 5,
    "client.consumer.tag.TagMessageWith1ConsumerIT": 8,
    "client.consumer.tag.TagMessageWithMulConsumerIT": 4,
    "client.consumer.tag.TagMessageWithSameGroupConsumerIT": 3,
    "client.consumer.topic.MulConsumerMulTopicIT": 3,
    "client.consumer.topic.OneConsumerMulTopicIT": 3,
    "client.producer.async.AsyncSendExceptionIT": 6,
    "client.producer.async.AsyncSendWithMessageQueueIT": 1,
    "client.producer.async.AsyncSendWithMessageQueueSelectorIT": 1,
    "client.producer.async.AsyncSendWithOnlySendCallBackIT": 1,
    "client.producer.batch.BatchSendIT": 2,
    "client.producer.exception.msg.ChinaPropIT": 2,
    "client.producer.exception.msg.MessageExceptionIT": 10,
    "client.producer.exception.msg.MessageUserPropIT": 2,
    "client.producer.exception.producer.ProducerGroupAndInstanceNameValidityIT": 2,
    "client.producer.oneway.OneWaySendExceptionIT": 3,
    "client.producer.oneway.OneWaySendIT": 1,
    "client.producer.oneway.OneWaySendWithMQIT": 1,
    "client.producer.oneway.OneWaySendWithSelectorIT": 1,
    "client.producer.order.OrderMsgDynamicRebalanceIT": 2,
    "client.producer.order.OrderMsgIT": 3,
    "client.producer.order.OrderMsgRebalanceIT": 2,
    "client.producer.order.OrderMsgWithTagIT": 5,
    "client.producer.querymsg.QueryMsgByIdExceptionIT": 2,
    "client.producer.querymsg.QueryMsgByIdIT": 1,
    "client.producer.querymsg.QueryMsgByKeyIT": 4,
    "client.producer.transaction.TransactionalMsgIT": 1,
    "delay.NormalMsgDelayIT": 4,
    "smoke.NormalMessageSendAndRecvIT": 1,
    "tls.TLS_IT": 1,
    "tls.TLS_Mix2_IT": 1,
    "tls.TLS_Mix_IT": 1,
}
"""Classes and how many tests each has. Left out: OrderMsgBroadCastIT (RocketMQ ignores it itself),
DLedgerProduceAndConsumeIT (starts brokers of its own), and classes without a test."""


@pytest.fixture(scope="module")
def name_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NameServer]:
    java.build()
    directory = tmp_path_factory.mktemp("nameserver")
    files = LocalTls(directory / "certs", [NodeId("n0")]).directory
    security = SecurityConfig(files / "n0.crt", files / "n0.key", files / "ca.crt", tls_client_auth=ClientAuth.NONE)
    with running(config_in(directory, security=security, tls_server_mode=TlsServerMode.PERMISSIVE)) as started:
        yield started


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, name_server: NameServer) -> Iterator[None]:
    """Two groups, once both have a master that is registered; with TLS for those who want it."""
    settings = {
        "brokerClusterName": CLUSTER,
        "namesrvAddr": name_server.address,
        "transactionCheckInterval": "2000",
        "tls_server_mode": "permissive",
        "tls_client_auth": "none",
    }
    with ExitStack() as stack:
        for name in BROKERS:
            stack.enter_context(LocalBrokers(tmp_path_factory.mktemp(name), name=name, settings=settings, tls=True))

        def all_lead() -> bool:
            table = known.brokers(name_server.address)
            return all(0 in table.get(name, {}) for name in BROKERS)

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
