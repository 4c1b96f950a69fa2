"""The core against whole brokers of this project."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rocketstore.broker.server import BrokerServer
from rocketstore.client.aio import errors
from rocketstore.client.aio.cluster import Cluster
from rocketstore.remoting.bodies.routes import KVTable
from rocketstore.remoting.codes import RequestCode
from tests.support.on_loop import on_loop
from tests.unit.rocketstore.broker.test_server import plain, running


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerServer]:
    with running(plain(tmp_path)) as server:
        yield server


@on_loop
async def test_a_group_is_found_without_a_name_server(broker: BrokerServer) -> None:
    """By one address of it: its name, its master, its topics."""
    cluster = Cluster(broker.address, None, timeout_s=20)
    (found,) = await cluster.brokers(cluster.deadline())
    assert (found.cluster, found.name, found.master) == (
        broker.config.cluster_name,
        broker.config.name,
        broker.address,
    )
    route = await cluster.route("TBW102", cluster.deadline())
    assert [one.broker_name for one in route.writable] == [found.name] * broker.config.default_topic_queue_nums
    answer = await cluster.ask_master(found.name, RequestCode.GET_BROKER_RUNTIME_INFO, deadline=cluster.deadline())
    assert "brokerVersionDesc" in KVTable.decode(answer.body).table
    with pytest.raises(errors.NotFoundError):
        await cluster.route("nowhere", cluster.deadline())
    await cluster.close()
