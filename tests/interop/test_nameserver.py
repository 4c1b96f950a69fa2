"""RocketMQ's broker, mqadmin and clients with our name server: ``make interop``."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner

from dledger_cli import cli
from dledger_cli.console.server import ConsoleServer, ListenAddress
from dledger_cli.local.group import free_ports
from dledger_cli.targets import BrokerTarget, GroupTarget
from rocketstore.nameserver.server import NameServer
from rocketstore.remoting.codes import RequestCode
from tests.interop import java, rocketmq
from tests.support import known
from tests.support.waiting import wait_until
from tests.unit.dledger_cli.console.support import request, stream
from tests.unit.rocketstore.nameserver.wire import calling, config_in, running

pytestmark = pytest.mark.interop

CLUSTER = "InteropCluster"
BROKER = "interop-a"
TOPIC = "InteropTopic"
MESSAGES = 100
START_TIMEOUT_S = 120


@pytest.fixture(scope="module", autouse=True)
def _programs() -> None:
    java.build()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NameServer]:
    """Ours."""
    with running(config_in(tmp_path, order_message_enable=True)) as started:
        yield started


@pytest.fixture
def broker(tmp_path: Path, server: NameServer) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Java's, once it has registered; and its port."""
    with _registered(tmp_path / "broker", server.address) as started:
        yield started


@contextmanager
def _registered(directory: Path, name_server: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    port = rocketmq.broker_port()
    settings = {
        "brokerClusterName": CLUSTER,
        "brokerName": BROKER,
        "brokerId": 0,
        "listenPort": port,
        "namesrvAddr": name_server,
    }
    with rocketmq.broker(directory, settings) as process:

        def is_registered() -> bool:
            return any(one.get(0) == f"127.0.0.1:{port}" for one in known.brokers(name_server).values())

        wait_until(is_registered, "broker registered", START_TIMEOUT_S)
        yield process, port


def _masters(server: NameServer) -> dict[str, str]:
    with calling(server) as caller:
        found = caller.json(RequestCode.GET_BROKER_CLUSTER_INFO)["brokerAddrTable"]
    return {name: one["brokerAddrs"].get("0", "") for name, one in found.items()}


def test_mqadmin_works_with_it(tmp_path: Path, server: NameServer, broker: tuple[subprocess.Popen[bytes], int]) -> None:
    """Every command of its that asks or changes a name server."""
    _, port = broker

    def admin(*arguments: str) -> str:
        return rocketmq.admin(tmp_path / "admin", *arguments, "-n", server.address)

    listed = admin("clusterList")
    assert [f"127.0.0.1:{port}" in line and CLUSTER in line and BROKER in line for line in listed.splitlines()][-1]
    assert "success" in admin("updateTopic", "-c", CLUSTER, "-t", TOPIC, "-r", "4", "-w", "4")
    route = admin("topicRoute", "-t", TOPIC)
    assert f"127.0.0.1:{port}" in route
    assert '"writeQueueNums":4' in route.replace(" ", "")
    assert TOPIC in admin("topicList", "-c")
    assert TOPIC in admin("topicClusterList", "-t", TOPIC) or CLUSTER in admin("topicClusterList", "-t", TOPIC)
    assert "wipe write perm" in admin("wipeWritePerm", "-b", BROKER)
    assert '"perm":4' in admin("topicRoute", "-t", TOPIC).replace(" ", "")
    assert "add write perm" in admin("addWritePerm", "-b", BROKER)
    assert '"perm":6' in admin("topicRoute", "-t", TOPIC).replace(" ", "")
    assert "success" in admin("updateKvConfig", "-s", "n", "-k", "k", "-v", "v")
    assert "success" in admin("updateOrderConf", "-t", TOPIC, "-v", f"{BROKER}:4", "-m", "put")
    assert f"{BROKER}:4" in admin("updateOrderConf", "-t", TOPIC, "-m", "get")
    with calling(server) as caller:
        assert dict(caller.ask(RequestCode.GET_KV_CONFIG, namespace="n", key="k").fields) == {"value": "v"}
        assert caller.json(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic=TOPIC)["orderTopicConf"] == f"{BROKER}:4"
    assert "success" in admin("deleteKvConfig", "-s", "n", "-k", "k")
    assert "orderMessageEnable" in admin("getNamesrvConfig")
    assert "success" in admin("updateNamesrvConfig", "-k", "orderMessageEnable", "-v", "false")
    assert "success" in admin("deleteTopic", "-c", CLUSTER, "-t", TOPIC)
    with calling(server) as caller:
        assert TOPIC not in caller.json(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)["topicList"]


def test_a_producer_and_a_consumer_find_the_broker(
    tmp_path: Path, server: NameServer, broker: tuple[subprocess.Popen[bytes], int]
) -> None:
    """The topic is made by the first send; all messages arrive. A killed broker is gone at once."""
    process, _ = broker

    sent = rocketmq.client(tmp_path / "producer", "produce", server.address, TOPIC, str(MESSAGES))
    assert sent == [f"SEND_OK {BROKER}"] * MESSAGES
    received = rocketmq.client(tmp_path / "consumer", "consume", server.address, TOPIC, str(MESSAGES))
    assert received == [str(number) for number in range(MESSAGES)]

    process.kill()
    wait_until(lambda: not _masters(server), "dropped")


def test_a_broker_that_stops_unregisters(
    server: NameServer, broker: tuple[subprocess.Popen[bytes], int], caplog: pytest.LogCaptureFixture
) -> None:
    """As `mqshutdown broker` ends it."""
    process, port = broker
    with caplog.at_level("INFO"):
        process.terminate()
        wait_until(lambda: not _masters(server), "dropped", START_TIMEOUT_S)
        process.wait(START_TIMEOUT_S)

    assert f"broker {BROKER}: 127.0.0.1:{port} unregistered" in caplog.text


def test_the_master_of_javas_group_changes(tmp_path: Path, server: NameServer) -> None:
    """Three brokers in DLedger mode: id -1 before there is a leader, 0 the leader, which is killed."""
    members = dict(zip(("n0", "n1", "n2"), free_ports(3), strict=True))
    peers = ";".join(f"{name}-127.0.0.1:{port}" for name, port in members.items())
    with ExitStack() as stack:
        running_at: dict[str, subprocess.Popen[bytes]] = {}
        for name in members:
            port = rocketmq.broker_port()
            settings = {
                "brokerClusterName": CLUSTER,
                "brokerName": BROKER,
                "listenPort": port,
                "namesrvAddr": server.address,
                "enableDLegerCommitLog": "true",
                "dLegerGroup": BROKER,
                "dLegerPeers": peers,
                "dLegerSelfId": name,
            }
            running_at[f"127.0.0.1:{port}"] = stack.enter_context(rocketmq.broker(tmp_path / name, settings))

        def addresses() -> dict[str, str]:
            with calling(server) as caller:
                found = caller.json(RequestCode.GET_BROKER_CLUSTER_INFO)["brokerAddrTable"]
            return dict(found.get(BROKER, {}).get("brokerAddrs", {}))

        wait_until(lambda: len(addresses()) == 3 and "0" in addresses(), "a master and slaves", START_TIMEOUT_S)
        assert set(addresses().values()) == running_at.keys()
        old = addresses()["0"]
        running_at.pop(old).kill()
        wait_until(lambda: old not in addresses().values(), "dropped")
        wait_until(lambda: addresses().get("0") in running_at, "another master", START_TIMEOUT_S)


@pytest.mark.parametrize("whose", ["ours", "Java's"])
def test_our_clients_find_javas_broker(tmp_path: Path, server: NameServer, whose: str) -> None:
    """Through either name server, which Java's answers in a dialect of JSON."""
    with ExitStack() as stack:
        address = server.address
        if whose == "Java's":
            address = stack.enter_context(rocketmq.name_server(tmp_path / "namesrv"))
        _, port = stack.enter_context(_registered(tmp_path / "broker", address))

        route = known.route(address, "TBW102")
        assert route is not None
        assert [dict(one.broker_addrs) for one in route.broker_datas] == [{0: f"127.0.0.1:{port}"}]
        assert known.route(address, "nowhere") is None
        assert "TBW102" in known.topics(address)
        listed: list[dict[str, object]] = []

        def tells_version() -> bool:
            """A broker that has just started cannot yet say how it is."""
            result = CliRunner().invoke(cli.main, ["cluster", "list", "--namesrv", address, "--json"])
            listed[:] = json.loads(result.output)["brokers"]
            return bool(listed[0].get("version"))

        wait_until(tells_version, "a version", START_TIMEOUT_S)
        (one,) = listed
        assert (one["cluster"], one["broker_name"], one["address"]) == (CLUSTER, BROKER, f"127.0.0.1:{port}")
        assert (one["is_master"], one["version"], one["reachable"]) == (True, "V4_9_7", True)


@pytest.mark.parametrize("whose", ["ours", "Java's"])
def test_the_console_shows_javas_broker(tmp_path: Path, server: NameServer, whose: str) -> None:
    """With what it tells, from either name server: version, rates, the queues of its topics; and no inside."""
    with ExitStack() as stack:
        address = server.address
        if whose == "Java's":
            address = stack.enter_context(rocketmq.name_server(tmp_path / "namesrv"))
        process, _ = stack.enter_context(_registered(tmp_path / "broker", address))
        target = GroupTarget(("127.0.0.1:1",), "", 5.0)
        brokers = BrokerTarget(target.bootstrap, 5.0, name_servers=(address,))
        url = stack.enter_context(ConsoleServer(target, brokers, place=ListenAddress(port=0))).url
        stack.enter_context(stream(f"{url}api/events"))  # a page, for which everybody is asked often

        def shown() -> dict[str, object]:
            groups: Any = request(f"{url}api/state").json()["groups"]
            return dict(groups[0]) if groups else {}

        wait_until(lambda: shown().get("gets") is not None, "it has rates", START_TIMEOUT_S)
        (member,) = cast("list[dict[str, object]]", shown()["members"])  # JSON
        assert (shown()["verdict"], shown()["kind"], shown()["cluster"]) == ("serving", "rocketmq", CLUSTER)
        assert (member["state"], member["version"], member["note"]) == ("master", "V4_9_7", "")
        topic: Any = request(f"{url}api/topic?name=TBW102").json()
        assert [(one["name"], one["error"], len(one["queues"])) for one in topic["groups"]] == [(BROKER, "", 8)]
        assert request(f"{url}api/state?broker={BROKER}").status == 409

        process.kill()
        wait_until(lambda: shown()["level"] == "bad", "it is missed", START_TIMEOUT_S)
