"""RocketMQ's producer while masters of a group are killed: nothing acknowledged is lost, and it soon goes on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

from dledger.errors import DLedgerError
from dledger_cli.local.brokers import LocalBrokers
from rocketstore.client import Admin
from rocketstore.nameserver.server import NameServer
from tests.interop import java, rocketmq
from tests.support import known
from tests.support.waiting import wait_until
from tests.unit.rocketstore.nameserver.wire import config_in, running

pytestmark = pytest.mark.interop

TOPIC: Final = "Failover"
LOAD_S: Final = 40
KILLS: Final = 3
BETWEEN_KILLS: Final = 200
"""Messages: a client that is still looking for the master meets the next kill otherwise."""
CLIENTS: Final = {
    "java": (None, rocketmq.client, 3.0),
    "go": (rocketmq.build_go_client, rocketmq.go_client, 4.5),
    "cpp": (rocketmq.install_cpp_client, rocketmq.cpp_client, 4.5),
}
"""How each is made and run, and the longest time without an acknowledgement: election, registration, and the client's
next look at the name server, twice per second here. Go's and C++'s clients first wait for 3 s, their time-out, for what
was under way."""


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


def _wait_for_more(admin: Admin) -> None:
    enough = _stored(admin) + BETWEEN_KILLS
    wait_until(lambda: _stored(admin) >= enough, "messages are stored again", 60)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_producer_goes_on_with_the_next_master(tmp_path: Path, name_server: NameServer, client: str) -> None:
    make, run, gap_s_max = CLIENTS[client]
    settings = {"namesrvAddr": name_server.address}
    if make is not None:
        make(tmp_path / "client")

    with (
        ThreadPoolExecutor(1) as pool,
        LocalBrokers(tmp_path / "brokers", name="failover", settings=settings) as brokers,
    ):

        def master() -> str:
            return known.brokers(name_server.address).get("failover", {}).get(0, "")

        wait_until(lambda: bool(master()), "the master is registered", 60)
        loading = pool.submit(run, tmp_path / "client", "load", name_server.address, TOPIC, str(LOAD_S))
        with brokers.admin() as admin:
            wait_until(lambda: _stored(admin) > 0, "messages are stored", 60)
        for _ in range(KILLS):
            killed = brokers.master()
            brokers.kill(killed)
            brokers.master(other_than=killed)
            brokers.start(killed)
            with brokers.admin() as admin:
                _wait_for_more(admin)
        acknowledged = [tuple(map(int, line.split()[:2])) for line in loading.result()]
        with brokers.admin() as admin:
            count = _stored(admin)
        stored: list[int] = []
        with brokers.consumer("check", TOPIC) as consumer:
            while len(stored) < count:
                stored += [int(one.body) for one in consumer.poll()]
    assert {number for number, _ in acknowledged} <= set(stored)
    times = [when for _, when in acknowledged]
    gaps = sorted((after - before) / 1000 for before, after in pairwise(times))
    assert gaps[-1] <= gap_s_max, f"{len(acknowledged)} acknowledged, longest gaps {gaps[-2 * KILLS :]} s"
