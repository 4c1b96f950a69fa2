"""A broker of RocketMQ's and a group of ours in one cluster, with a topic in both: ``make interop``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest

from dledger.errors import DLedgerError
from dledger_cli.local.brokers import LocalBrokers
from rocketstore.client import Consumer, Message, Producer
from rocketstore.nameserver.server import NameServer
from rocketstore.remoting.codes import RequestCode
from tests.interop import java, rocketmq
from tests.support.waiting import wait_until
from tests.unit.rocketstore.nameserver.wire import calling, config_in, running

pytestmark = pytest.mark.interop

CLUSTER: Final = "Mixed"
THEIRS: Final = "theirs"
OURS: Final = "ours"
TOPIC: Final = "Shared"
KILLS: Final = 2
BETWEEN_KILLS: Final = 100
"""Messages of each producer that both brokers acknowledge."""
FIRST_OF_OURS: Final = 1_000_000
"""The number of our producer's first message: RocketMQ's producer begins with 0."""
TIMEOUT_S: Final = 180


@pytest.fixture
def name_server(tmp_path: Path) -> Iterator[NameServer]:
    java.build()
    with running(config_in(tmp_path)) as started:
        yield started


@pytest.fixture
def group(tmp_path: Path, name_server: NameServer) -> Iterator[LocalBrokers]:
    """Ours, next to RocketMQ's broker, once both have the topic."""
    settings = {"brokerClusterName": CLUSTER, "namesrvAddr": name_server.address}
    theirs = settings | {"brokerName": THEIRS, "brokerId": 0, "listenPort": rocketmq.broker_port()}
    with (
        rocketmq.broker(tmp_path / "theirs", theirs),
        LocalBrokers(tmp_path / "ours", name=OURS, settings=settings) as ours,
    ):
        wait_until(lambda: _masters(name_server) == {THEIRS, OURS}, "both have registered", TIMEOUT_S)
        words = ("updateTopic", "-c", CLUSTER, "-t", TOPIC, "-r", "4", "-w", "4", "-n", name_server.address)
        assert rocketmq.admin(tmp_path / "admin", *words).count("success") == 2
        yield ours


def _masters(server: NameServer) -> set[str]:
    with calling(server) as caller:
        found = caller.json(RequestCode.GET_BROKER_CLUSTER_INFO)["brokerAddrTable"]
    return {name for name, one in found.items() if "0" in one["brokerAddrs"]}


@contextmanager
def _producing(name_server: NameServer) -> Iterator[list[int]]:
    """Our producer meanwhile; gives the numbers that were acknowledged so far."""
    acknowledged: list[int] = []
    ending = threading.Event()

    def run() -> None:
        number = FIRST_OF_OURS
        with Producer(name_servers=name_server.address) as producer:
            while not ending.wait(0.005):
                try:
                    producer.send(Message(TOPIC, b"%d" % number))
                    acknowledged.append(number)
                except DLedgerError:  # not acknowledged
                    pass
                number += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield acknowledged
    finally:
        ending.set()
        thread.join()


def _by_broker(printed: list[str]) -> dict[str, set[int]]:
    """The numbers in what RocketMQ's client has printed; a queue's number may follow the broker's name."""
    found: dict[str, set[int]] = {THEIRS: set(), OURS: set()}
    for line in printed:
        number, *_, broker = line.split()
        found[broker.rstrip("0123456789")].add(int(number))
    return found


def test_nothing_is_lost_while_our_masters_die(tmp_path: Path, name_server: NameServer, group: LocalBrokers) -> None:
    """Clients of both kinds use both, and each finds what any of them sent."""
    address = name_server.address
    with ExitStack() as stack:
        received = stack.enter_context(rocketmq.open_client(tmp_path / "listener", "share", address, TOPIC, "0"))
        with (
            rocketmq.open_client(tmp_path / "load", "load", address, TOPIC, "600") as sent,
            _producing(name_server) as sent_by_ours,
        ):

            def more() -> Callable[[], bool]:
                enough = {name: len(one) + BETWEEN_KILLS for name, one in _by_broker(sent()).items()}
                of_ours = len(sent_by_ours) + BETWEEN_KILLS

                def is_enough() -> bool:
                    now = _by_broker(sent())
                    return len(sent_by_ours) >= of_ours and all(len(now[name]) >= enough[name] for name in enough)

                return is_enough

            wait_until(more(), "messages are acknowledged", TIMEOUT_S, poll_s=0.1)
            for _ in range(KILLS):
                killed = group.master()
                group.kill(killed)
                group.master(other_than=killed)
                group.start(killed)
                wait_until(more(), "messages are acknowledged again", TIMEOUT_S, poll_s=0.1)
        theirs, ours = _by_broker(sent())[THEIRS], _by_broker(sent())[OURS]
        acknowledged = theirs | ours | set(sent_by_ours)

        def has_all() -> bool:
            found = _by_broker(received())
            return theirs <= found[THEIRS] and ours <= found[OURS] and acknowledged <= found[THEIRS] | found[OURS]

        wait_until(has_all, "RocketMQ's consumer has received all", TIMEOUT_S, poll_s=0.5)
        for name, found in _by_broker(received()).items():
            assert not found.isdisjoint(sent_by_ours), f"our producer has sent nothing to {name}"
        read: set[int] = set()
        with Consumer(name_servers=address, group="check", topics=TOPIC, start="first") as consumer:

            def has_read_all() -> bool:
                read.update(int(one.body) for one in consumer.poll())
                return acknowledged <= read

            wait_until(has_read_all, "our consumer has received all, too", TIMEOUT_S, poll_s=0)
