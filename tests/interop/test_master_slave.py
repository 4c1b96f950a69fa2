"""RocketMQ's brokers 4.9.7 as slaves of ours, and ours as slaves of theirs: ``make interop``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from rocketstore.nameserver.server import NameServer
from rocketstore.server import BrokerServer
from rocketstore.settings import load_broker_settings
from tests.interop import java, rocketmq
from tests.support.waiting import wait_until
from tests.unit.rocketstore.nameserver.wire import config_in, running

pytestmark = pytest.mark.interop

BROKER = "pair-a"
CLUSTER = "Pair"
TOPIC = "PairTopic"
FILE_BYTES = 1 << 16
START_TIMEOUT_S = 120
MESSAGES = 2000
"""More than one pull of each queue may return."""


@pytest.fixture(scope="module", autouse=True)
def _programs() -> None:
    java.build()


@pytest.fixture
def name_server(tmp_path: Path) -> Iterator[NameServer]:
    with running(config_in(tmp_path)) as started:
        yield started


@contextmanager
def ours(directory: Path, name_server: NameServer, **settings: object) -> Iterator[BrokerServer]:
    """One of ours."""
    flags = {
        "storePathRootDir": directory / "store",
        "listenPort": rocketmq.broker_port(),
        "namesrvAddr": name_server.address,
        "brokerClusterName": CLUSTER,
        "brokerName": BROKER,
        "mappedFileSizeCommitLog": FILE_BYTES,
        "registerNameServerPeriod": 10_000,
        "maxHashSlotNum": 1000,
        "maxIndexNum": 4000,
    } | settings
    started = BrokerServer(load_broker_settings(None, {}, {name: str(one) for name, one in flags.items()})[0]).start()
    try:
        yield started
    finally:
        started.stop()


@contextmanager
def theirs(directory: Path, name_server: NameServer, **settings: object) -> Iterator[int]:
    """One of RocketMQ's; gives its port."""
    port = rocketmq.broker_port()
    flags = {
        "listenPort": port,
        "namesrvAddr": name_server.address,
        "brokerClusterName": CLUSTER,
        "brokerName": BROKER,
        "mappedFileSizeCommitLog": FILE_BYTES,
    } | settings
    with rocketmq.broker(directory, flags):
        yield port


def files_of(store: Path) -> dict[str, bytes]:
    """The log's files that are not blank."""
    found = {one.name: one.read_bytes() for one in sorted((store / "commitlog").iterdir()) if one.name.isdigit()}
    return {name: content for name, content in found.items() if content.strip(b"\0")}


def same(first: Path, second: Path) -> bool:
    """Whether two logs have the same bytes."""
    return files_of(first) == files_of(second)


def fill(address: str, tmp_path: Path, seconds: int = 10) -> int:
    """Messages of RocketMQ's producer, for so long; how many it takes for sent."""
    count = len(rocketmq.client(tmp_path / "client", "load", address, TOPIC, str(seconds)))
    assert count > 0
    return count


def test_a_slave_of_rocketmq_follows_our_master(tmp_path: Path, name_server: NameServer) -> None:
    """Its log is ours byte for byte."""
    with ExitStack() as stack:
        master = stack.enter_context(ours(tmp_path / "ours", name_server))
        replication = master.replication
        assert replication is not None
        settings = {"brokerRole": "SLAVE", "brokerId": 1, "haMasterAddress": f"127.0.0.1:{replication.port}"}
        stack.enter_context(theirs(tmp_path / "theirs", name_server, **settings))
        wait_until(lambda: len(replication.slaves()) == 1, "the slave follows", START_TIMEOUT_S)
        fill(name_server.address, tmp_path)
        end = master.store.log.end_offset
        assert end > 2 * FILE_BYTES
        wait_until(lambda: [one.acknowledged for one in replication.slaves()] == [end], "it has all", START_TIMEOUT_S)
        wait_until(lambda: same(tmp_path / "ours/store", tmp_path / "theirs/store"), "byte for byte", START_TIMEOUT_S)
        assert replication.slaves()[0].broker_id == -1  # it does not say


def test_our_slave_follows_a_master_of_rocketmq(tmp_path: Path, name_server: NameServer) -> None:
    """Its log is the master's byte for byte, and its messages can be read."""
    with ExitStack() as stack:
        port = stack.enter_context(theirs(tmp_path / "theirs", name_server))
        settings = {"brokerRole": "SLAVE", "brokerId": 1, "haMasterAddress": f"127.0.0.1:{port + 1}"}
        slave = stack.enter_context(ours(tmp_path / "ours", name_server, **settings))
        replication = slave.replication
        assert replication is not None

        def follows() -> bool:
            view = replication.master()
            return view is not None and view.is_connected

        wait_until(follows, "our slave follows", START_TIMEOUT_S)
        count = fill(name_server.address, tmp_path)
        wait_until(lambda: slave.store.log.end_offset > 2 * FILE_BYTES, "it has the messages", START_TIMEOUT_S)
        wait_until(lambda: same(tmp_path / "ours/store", tmp_path / "theirs/store"), "byte for byte", START_TIMEOUT_S)
        view = replication.master()
        assert view is not None
        assert not view.is_ours
        wait_until(lambda: sum(slave.store.max_offset(TOPIC, queue) for queue in range(8)) >= count, "all can be read")
        wait_until(lambda: slave.state.topic(TOPIC) is not None, "topics are taken over", START_TIMEOUT_S)
    with ours(tmp_path / "ours", name_server) as promoted:  # by a restart as master
        topic = promoted.state.topic(TOPIC)
        assert topic is not None
        assert promoted.store.refusal is None
        assert sum(promoted.store.max_offset(TOPIC, queue) for queue in range(8)) >= count
        assert fill(name_server.address, tmp_path, seconds=3)


def test_rocketmqs_consumers_that_are_slow_read_from_our_slave(
    tmp_path: Path, name_server: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``slaveReadEnable``, the master sends them there; they get everything, and commit their offsets at it."""
    with ExitStack() as stack:
        master = stack.enter_context(ours(tmp_path / "m", name_server, slaveReadEnable="true"))
        assert master.replication is not None
        follows = {"brokerRole": "SLAVE", "brokerId": 1, "haMasterAddress": f"127.0.0.1:{master.replication.port}"}
        slave = stack.enter_context(ours(tmp_path / "s", name_server, slaveReadEnable="true", **follows))
        assert slave.replication is not None
        rocketmq.client(tmp_path / "producer", "produce", name_server.address, TOPIC, str(MESSAGES))
        end = master.store.log.max_offset
        wait_until(lambda: slave.store.dispatch_position >= end, "the slave has everything", START_TIMEOUT_S)
        for one in (master, slave):
            monkeypatch.setattr(one.store._reader, "memory_bytes_max", 0)  # as if more was stored than fits into it

        consumed = rocketmq.client(tmp_path / "consumer", "consume", name_server.address, TOPIC, str(MESSAGES))

        assert len(consumed) == MESSAGES
        assert slave.store.stats.transferred > MESSAGES // 2
        wait_until(
            lambda: sum(one.offset for one in master.state.offsets("interop-consumers", TOPIC)) == MESSAGES,
            "offsets are committed at the master",
            START_TIMEOUT_S,
        )
