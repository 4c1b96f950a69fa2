"""RocketMQ's own sets of conf files start as they are; on one machine with other ports and directories, as there."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from dledger.errors import ConfigError
from dledger.remoting.codes import AnswerCode
from dledger_cli.local.group import free_ports
from rocketstore.nameserver.settings import load_name_server_settings
from rocketstore.server import BrokerServer
from rocketstore.settings import load_broker_settings
from rocketstore.types import BrokerRole
from tests.support.waiting import wait_until
from tests.unit.rocketstore.nameserver.wire import config_in, running
from tests.unit.rocketstore.test_server import send

CONF = Path(__file__).parent / "conf"
FILES = sorted(CONF.glob("*/*.properties"))
NAME_SERVER = {"NAMESRV_ADDR": "127.0.0.1:9876"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_conf_file_of_rocketmq_is_understood(file: Path) -> None:
    """Every line of it, with RocketMQ's variable for the name servers."""
    config, warnings = load_broker_settings(file, NAME_SERVER, {})
    assert config.name_servers == ("127.0.0.1:9876",)
    assert (config.store.broker_role is BrokerRole.SLAVE) == file.stem.endswith("-s") == (config.broker_id == 1)
    assert warnings == ()


def warned(file: Path, environ: dict[str, str] = NAME_SERVER) -> list[str]:
    """The warnings of a broker with a conf file, without the file's directory."""
    return [one.replace(f"{file.parent}/", "") for one in load_broker_settings(file, environ, {})[1]]


def test_the_single_brokers_file_starts_without_a_word() -> None:
    """conf/broker.conf: blanks around every ``=``."""
    assert warned(CONF / "standalone" / "broker.conf") == []


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_groups_files_start_with_two_lines(number: int) -> None:
    """conf/dledger: thread pools, and a directory that RocketMQ's replicated log does not use either."""
    file = CONF / "dledger" / f"broker-n{number}.conf"

    assert load_broker_settings(file, {}, {})[0].node_id == f"n{number}"
    assert warned(file) == [
        f"settings that change nothing with enableDLegerCommitLog=true: storePathCommitLog ({file.name}:6)",
        "settings that change nothing here: sendMessageThreadPoolNums (no thread pools)",
    ]


@pytest.mark.parametrize("name", ["a-in-container1", "a-in-container2", "b-in-container1", "b-in-container2"])
def test_a_contained_brokers_file_starts_a_broker_and_says_what_it_lacks(name: str) -> None:
    """RocketMQ 5's conf/container: copies count as configured, but nobody acts for a master."""
    file = CONF / "container" / f"broker-{name}.conf"

    config, _ = load_broker_settings(file, NAME_SERVER, {})

    assert (config.store.in_sync_replicas, config.slave_read_enable) == (2, True)
    controller, acting = warned(file)
    assert controller.startswith("RocketMQ 5's controller: not supported: totalReplicas, enableAutoInSyncReplicas, ")
    assert f"({file.name}:10,13,15,16,17). Masters are elected by the broker group itself" in controller
    assert acting.startswith("broker containers and acting masters: not supported: enableSlaveActingMaster")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("container/broker-container1.conf", r"broker-container1\.conf:4: brokerConfigPaths=.*dledger broker -c FILE"),
        (
            "controller/broker-n0.conf",
            r"broker-n0\.conf:7: enableControllerMode=true: .*set enableDLegerCommitLog=true",
        ),
    ],
)
def test_files_of_what_is_not_there_are_refused_with_the_way_out(name: str, words: str) -> None:
    """A container of brokers, and a broker whose role a controller decides."""
    with pytest.raises(ConfigError, match=words):
        load_broker_settings(CONF / name, {}, {})


def test_the_file_that_tutorials_copy_from_each_other_starts(tmp_path: Path) -> None:
    """Names of several releases of RocketMQ, some of which no longer exist there either, in three lines."""
    file = tmp_path / "broker.conf"
    file.write_text(
        "brokerClusterName=rocketmq-cluster\nbrokerName=broker-a\nbrokerId=0\nnamesrvAddr=ns1:9876;ns2:9876\n"
        "defaultTopicQueueNums=4\nautoCreateTopicEnable=true\nautoCreateSubscriptionGroup=true\nlistenPort=10911\n"
        "deleteWhen=04\nfileReservedTime=120\nmapedFileSizeCommitLog=1073741824\nmapedFileSizeConsumeQueue=300000\n"
        "destroyMapedFileIntervalForcibly=120000\nredeleteHangedFileInterval=120000\ndiskMaxUsedSpaceRatio=88\n"
        "storePathRootDir=/usr/local/rocketmq/store\nstorePathCommitLog=/usr/local/rocketmq/store/commitlog\n"
        "storePathConsumeQueue=/usr/local/rocketmq/store/consumequeue\nstorePathIndex=/usr/local/rocketmq/store/index\n"
        "storeCheckpoint=/usr/local/rocketmq/store/checkpoint\nabortFile=/usr/local/rocketmq/store/abort\n"
        "maxMessageSize=65536\nflushCommitLogLeastPages=4\nflushConsumeQueueLeastPages=2\n"
        "flushCommitLogThoroughInterval=10000\nflushConsumeQueueThoroughInterval=60000\nbrokerRole=ASYNC_MASTER\n"
        "flushDiskType=ASYNC_FLUSH\ncheckTransactionMessageEnable=true\nsendMessageThreadPoolNums=128\n"
        "pullMessageThreadPoolNums=128\n"
    )

    found = warned(file, {})

    assert [one.partition(" (")[0].partition(": ")[0] for one in found] == [
        "names that RocketMQ ignores as well",
        "settings that change nothing here",
        "diskMaxUsedSpaceRatio=88",
    ]
    assert "counts as 85" in found[-1]


def test_name_servers_of_rocketmq_5_start_and_say_what_they_lack(tmp_path: Path) -> None:
    """conf/container, conf/controller; the plug-in's files begin with an XML comment."""
    acting, controller = (
        load_name_server_settings(CONF / "nameserver" / f"{name}.conf", {}, {})[1]
        for name in ("acting-master", "controller")
    )
    assert [one.partition(":")[0] for one in acting] == ["broker containers and acting masters"]
    assert [one.partition(":")[0] for one in controller] == ["AVAILABILITY", "RocketMQ 5's controller"]

    file = tmp_path / "namesrv-n0.conf"
    file.write_text("<!--\n  Licensed to somebody = else\n  -->\n#Namesrv config\nlistenPort = 9886\n")
    config, warnings = load_name_server_settings(file, {}, {})
    assert (config.listen_port, warnings) == (9886, ())


def test_a_setting_precedes_rocketmqs_variable() -> None:
    """Also a variable of ours."""
    config, _ = load_broker_settings(FILES[0], NAME_SERVER | {"DLEDGER_NAMESRV_ADDR": "127.0.0.1:1"}, {})
    assert config.name_servers == ("127.0.0.1:1",)


def start(stack: ExitStack, file: Path, directory: Path, **settings: str) -> BrokerServer:
    """The broker of a conf file, small, and not where all of them would be."""
    listen_port, ha_port = free_ports(2)
    flags = {
        "storePathRootDir": str(directory / file.stem),
        "listenPort": str(listen_port),
        "haListenPort": str(ha_port),
        "vipPort": "0",
        "registerNameServerPeriod": "10000",
        "mappedFileSizeCommitLog": "1m",
        "mappedFileSizeConsumeQueue": "2000",
        "maxHashSlotNum": "100",
        "maxIndexNum": "400",
    } | settings
    server = BrokerServer(load_broker_settings(file, {}, flags)[0])
    stack.callback(server.stop)
    return server.start()


@pytest.mark.parametrize("name", ["2m-2s-async", "2m-2s-sync", "2m-noslave"])
def test_a_set_of_conf_files_makes_a_cluster(tmp_path: Path, name: str) -> None:
    """Masters take messages, slaves find them by the name server and follow."""
    with ExitStack() as stack:
        known = {"namesrvAddr": stack.enter_context(running(config_in(tmp_path))).address}
        brokers = {file.stem: start(stack, file, tmp_path, **known) for file in FILES if file.parent.name == name}
        masters = [one for one in brokers.values() if one.store.role is not BrokerRole.SLAVE]
        assert len(masters) == (3 if name == "2m-noslave" else 2)
        for slave in (one for one in brokers.values() if one.store.role is BrokerRole.SLAVE):
            replication = slave.replication
            assert replication is not None
            wait_until(lambda one=replication: one.facts().is_connected, f"{slave.config.name}'s slave follows")  # type: ignore[misc]  # evaluated at once
        for master in masters:
            assert [one.code for one in send(master, b"one")] == [AnswerCode.SUCCESS]
        for slave in (one for one in brokers.values() if one.store.role is BrokerRole.SLAVE):
            master = brokers[slave.config.name]
            wait_until(lambda a=slave, b=master: a.store.log.max_offset == b.store.log.max_offset, "it has everything")  # type: ignore[misc]  # evaluated at once


def test_two_of_them_on_one_machine_need_other_ports(tmp_path: Path) -> None:
    """The second one says which port is in use."""
    first, second = (CONF / "2m-noslave" / f"broker-{name}.properties" for name in ("a", "b"))
    with ExitStack() as stack:
        running_one = start(stack, first, tmp_path)
        with pytest.raises(ConfigError, match=rf":{running_one.port}: the port is in use"):
            start(stack, second, tmp_path, listenPort=str(running_one.port))
