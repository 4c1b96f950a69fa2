"""Our brokers with our name server: the route follows the master, whatever becomes of either side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dledger.values import parse_address
from dledger_cli.local.brokers import LocalBrokers
from rocketstore.client.aio.admin_requests import TopicInfo
from rocketstore.client.blocking import Admin
from tests.support import known
from tests.support.waiting import wait_until
from tests.unit.rocketstore.nameserver.wire import config_in, running

TIMEOUT_S = 60
TOPIC = "orders"


@pytest.mark.smoke
@pytest.mark.slow
def test_the_route_follows_the_master(tmp_path: Path) -> None:
    """A group of three: its master is killed and comes back as a slave; the name server starts again with nothing."""
    config = config_in(tmp_path)
    with running(config) as server:
        config = replace(config, listen_port=parse_address(server.address)[1])
        settings = {
            "mappedFileSizeCommitLog": "16m",
            "namesrvAddr": server.address,
            "registerNameServerPeriod": "60000",
        }
        with LocalBrokers(tmp_path / "brokers", settings=settings) as brokers:
            everywhere = {node.client_address for node in brokers.nodes.values()}

            def addresses() -> dict[int, str]:
                return known.brokers(server.address).get(brokers.name, {})

            def is_complete(master: str) -> bool:
                found = addresses()
                return set(found.values()) == everywhere and found.get(0) == master

            first = brokers.master()
            old = brokers.nodes[first].client_address
            wait_until(lambda: is_complete(old), "all have registered", TIMEOUT_S)
            with Admin(brokers.addresses) as admin:
                admin.put_topic(TopicInfo(TOPIC, 4, 4))
            wait_until(lambda: known.route(server.address, TOPIC) is not None, "the topic has a route", TIMEOUT_S)

            brokers.kill(first)
            wait_until(lambda: old not in addresses().values(), "dropped", TIMEOUT_S)
            second = brokers.nodes[brokers.master(other_than=first)].client_address
            wait_until(lambda: addresses().get(0) == second, "the new master", TIMEOUT_S)
            brokers.start(first)
            wait_until(lambda: is_complete(second), "the old one is a slave", TIMEOUT_S)

            server.stop()
            with running(config):
                wait_until(lambda: is_complete(second), "all have registered again, before the period", TIMEOUT_S / 2)
                route = known.route(server.address, TOPIC)
                assert route is not None
                assert [(one.broker_name, one.write_queue_nums) for one in route.queue_datas] == [(brokers.name, 4)]
